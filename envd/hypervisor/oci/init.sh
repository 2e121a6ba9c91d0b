# The first process of a container: X server, guest agent, session and guestd. Arguments: width, height, keyboard layout,
# and an option of setpriv, or nothing, for the session.
# /envd is a directory of the host, with the three sockets; only root can enter it.
exec </dev/null >>/envd/console.log 2>&1
system_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
PATH=$system_path
width=$1 height=$2 layout=$3 no_new_privs=$4
groups=/sys/fs/cgroup

# Enters a control group, if the container has any. The process must be one of its own, not a part of this shell's.
enter() {
	[ -e $groups/cgroup.procs ] || return 0
	mkdir -p "$groups/$1"
	echo 0 >"$groups/$1/cgroup.procs"
}
[ ! -e $groups/cgroup.procs ] || echo 0 >$groups/cgroup.procs

mkdir -p /run/lock /run/user/1000
chown 1000:1000 /run/user/1000
chmod 0700 /run/user/1000
# Builders of container images leave it empty.
[ -s /etc/hosts ] || printf '127.0.0.1 localhost desktop\n::1 localhost\n' >/etc/hosts
rm -rf /tmp/.X11-unix /tmp/.ICE-unix
mkdir -m 1777 /tmp/.X11-unix /tmp/.ICE-unix
set -a
. /usr/lib/envd/environment
set +a

# It continues while the machine is paused, so that its screen can be read, and the session's user cannot end it.
x_server() {
	[ ! -e /envd/display/cgroup.procs ] || echo 0 >/envd/display/cgroup.procs
	exec Xtigervnc :0 -geometry "${width}x$height" -depth 24 -rfbunixpath /envd/vnc.sock -rfbunixmode 0600 -rfbport -1 \
		-SecurityTypes None -AlwaysShared -AcceptSetDesktopSize=0 -SendCutText=0 -AcceptCutText=0 -RawKeyboard=1 \
		-nolisten tcp -noreset -ac -s 0 -dpms -desktop TigerVNC
}

session() {
	enter user.slice/session.scope
	while [ ! -S /tmp/.X11-unix/X0 ]; do sleep 0.02; done
	[ -z "$layout" ] || setxkbmap -layout "$layout"
	# Xorg, as in virtual machines, rounds the size in millimetres down, and TigerVNC rounds it to the nearest. Xft, which
	# draws the titles of windows, computes its resolution from it. Some images have no xrandr; they have no such titles.
	xrandr --fbmm $((width * 254 / 960))x$((height * 254 / 960)) || :
	# If memory runs out, the kernel ends programs of the session before the server and the agent.
	echo 500 >/proc/self/oom_score_adj
	cd /home/user || exit
	exec setpriv --reuid=1000 --regid=1000 --init-groups --inh-caps=-all $no_new_privs sh -c '
		dbus-daemon --session --nofork --nopidfile --address="$DBUS_SESSION_BUS_ADDRESS" &
		bus=$!
		while [ ! -S "$XDG_RUNTIME_DIR/bus" ]; do sleep 0.01; done
		/usr/lib/envd/session
		status=$?
		kill $bus
		exit $status'
}

# As xinit does: the server ends with the session. A session that fails starts again, unless it has been used: then its
# user has ended it. One that fails each time ends the container, so that nobody waits for it.
desktop() {
	failures=0
	while [ $failures -lt 5 ]; do
		rm -f /tmp/.X0-lock /tmp/.X11-unix/X0 /run/user/1000/bus
		(x_server) &
		server=$!
		(session)
		status=$?
		kill $server
		wait $server
		[ $status -ne 0 ] && [ ! -e /envd/used ] || return
		failures=$((failures + 1))
		sleep 1
	done
	echo "the session failed $failures times, at last with status $status"
	PATH=$system_path poweroff -f
}

guestd() {
	enter system.slice/envd-guestd.service
	cd /home/user 2>/dev/null || cd /
	while :; do
		PYTHONPATH=/usr/lib/envd python3 -sP -m guestd --user user --wait-window Tint2 --socket /envd/guestd.sock
		sleep 1
	done
}

agent() {
	enter system.slice/qemu-guest-agent.service
	while :; do
		HOME=/root USER=root LOGNAME=root PATH=$system_path qemu-ga --method=unix-listen --path=/envd/agent.sock
		sleep 1
	done
}

# systemctl's shutdown commands ask here if systemd is not the first process (initctl(8)): a level is at byte 8.
shutdowns() {
	PATH=$system_path
	mkfifo -m 0600 /run/initctl
	while :; do
		case $(dd bs=384 count=1 2>/dev/null | od -An -tu4 -j8 -N4) in
		*48) poweroff -f ;;
		*54) reboot -f ;;
		esac
	done <>/run/initctl
}

(agent) &
(guestd) &
(shutdowns) &
(desktop) &
# The shell collects every process that ends, also those whose parent ended before.
while :; do
	wait
	sleep 1
done
