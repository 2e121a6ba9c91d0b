# Control groups stop all processes of a group at once, and a process cannot leave its group. Signals are for guests
# without version 2 of them: a process can have a timer send itself SIGCONT. Programs that the host started as the user
# are in the groups of the services that did, whose own processes are root's and continue in another group.
# What the shell can do itself, it does: each program costs an emulated guest 0.1 s. But a group may have thousands of
# processes, which the shell would read a byte at a time.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /sys/fs/cgroup || exit
services=
for service in system.slice/qemu-guest-agent.service system.slice/envd-*.service; do
  [ ! -d "$service" ] || services="$services $service"
done
groups=$services
[ ! -d user.slice ] || groups="user.slice $services"
