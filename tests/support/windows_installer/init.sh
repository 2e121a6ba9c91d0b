#!/bin/busybox sh
# The stand-in for Windows: first process of its medium and of the system that it installs.
#
# Reads the answer file where Windows Setup does, in the root of a removable medium, applies what it can check, and
# restarts between the passes. On any problem it shows a message and waits, as Setup does. Faults are named in the
# file `sources/fault` of its medium.
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mkdir -p /proc /sys /cd /answers /usr/bin /usr/sbin /sbin
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sys /sys
find /lib/modules -name '*.ko' | sed 's,.*/,,; s,\.ko$,,' | xargs modprobe -a
exec </dev/tty0 >/dev/tty0 2>&1
printf '\033[?25l\033[97;44m\033[2J\033[H'

say() { printf '\n  %s\n' "$*"; }

# Show a problem and wait for a user, who never comes.
stop() {
  say "Windows cannot be installed: $*"
  while :; do sleep 1000; done
}

# Send a line to the serial port, as the scripts of the answer disc do.
report() { printf 'envd-setup: %s\r\n' "$1" >/dev/ttyS0; }

# Write what a script of the answer disc would report.
run_script() {
  [ -f "/answers/envd/$1" ] || stop "$1 is missing"
  tr -d '\r' <"/answers/envd/$1" | sed -n 's/^echo envd-setup: \(.*\)>COM1$/\1/p' | while read -r line; do report "$line"; done
}

# Convert the answer file, which has one element per line, to lines of the form pass/component/path=text.
flatten() {
  awk '
    function name(line) { sub(/^ *<\/?/, "", line); sub(/[ >].*/, "", line); return line }
    function attribute(line, key) { return match(line, key "=\"[^\"]*\"") ? substr(line, RSTART + length(key) + 2, RLENGTH - length(key) - 3) : "" }
    /^ *<\?/ { next }
    /^ *<\// { depth--; next }
    {
      part = name($0)
      if (part == "settings") part = attribute($0, "pass")
      if (part == "component") part = attribute($0, "name")
      path = part
      if (depth > 1) path = stack[depth - 1] "/" part
      if ($0 ~ /<\//) { text = $0; sub(/^[^>]*>/, "", text); sub(/<.*/, "", text); print path "=" text; next }
      stack[depth++] = path
    }' "$1"
}

answer() { sed -n "s,^$1=,,p" /tmp/answers | head -n 1; }

find_discs() {
  mkdir -p /tmp
  until [ -e /dev/sr1 ]; do sleep 0.2; done
  for device in /dev/sr*; do
    mount -t iso9660 -o ro "$device" /cd || continue
    if [ -f /cd/autounattend.xml ]; then mount -t iso9660 -o ro "$device" /answers; else setup=$device; fi
    umount /cd
  done
  [ -n "$setup" ] && mount -t iso9660 -o ro "$setup" /cd
  [ -f /answers/autounattend.xml ] || stop "no removable medium has autounattend.xml in its root"
  flatten /answers/autounattend.xml >/tmp/answers
  fault=$(cat /cd/sources/fault 2>/dev/null)
}

pe=windowsPE/Microsoft-Windows-Setup
shell=oobeSystem/Microsoft-Windows-Shell-Setup

# Windows PE: drivers, edition, disk layout, copy.
install() {
  find_discs
  say "Windows Setup"
  run_script setup.cmd
  path=$(sed -n 's,^windowsPE/Microsoft-Windows-PnpCustomizationsWinPE/DriverPaths/PathAndCredentials/Path=D:.,,p' /tmp/answers)
  [ "$fault" = no-driver ] && path=absent
  ls "/answers/$path"/vioscsi/*.inf >/dev/null 2>&1 || stop "no drives were found: load a driver (looked in D:\\$path)"
  until [ -b /dev/sda ]; do sleep 0.2; done
  edition=$(answer $pe/ImageInstall/OSImage/InstallFrom/MetaData/Value)
  [ "$fault" = wrong-edition ] && edition="$edition N"
  tr -d '\000' </cd/sources/install.wim | grep -aqF "<NAME>$edition</NAME>" || stop "the image has no edition $edition"
  [ "$(answer $pe/UserData/AcceptEula)" = true ] || stop "the licence terms were not accepted"

  types=$(sed -n "s,^$pe/DiskConfiguration/Disk/CreatePartitions/CreatePartition/Type=,,p" /tmp/answers | tr '\n' ' ')
  [ "$types" = "EFI MSR Primary " ] || stop "the disk layout is $types"
  sizes=$(sed -n "s,^$pe/DiskConfiguration/Disk/CreatePartitions/CreatePartition/Size=,,p" /tmp/answers)
  disk_mib=$(($(cat /sys/block/sda/size) / 2048))
  needed_mib=1000
  [ "$fault" = no-disk-space ] && needed_mib=10000000
  [ $disk_mib -gt $needed_mib ] || stop "the disk has $disk_mib MiB, but $needed_mib MiB are needed"
  set -- $sizes
  printf 'label: gpt\nsize=%sMiB, type=U\nsize=%sMiB, type=E3C9E316-0B5C-4DB8-817D-F92DF00215AE\ntype=EBD0A0A2-B9E5-4433-87C0-68B6B72699C7\n' \
    "$1" "$2" | /usr/sbin/sfdisk -q /dev/sda || stop "the disk could not be partitioned"
  until [ -b /dev/sda3 ]; do sleep 0.2; done
  target=$(answer $pe/ImageInstall/OSImage/InstallTo/PartitionID)
  say "Copying Windows files"
  dd if=/cd/efi/microsoft/boot/efisys_noprompt.bin of=/dev/sda1 bs=1M 2>/dev/null || stop "copying failed"
  zcat /cd/sources/system.gz | dd of="/dev/sda$target" bs=1M 2>/dev/null || stop "copying failed"
  [ "$fault" = hang ] && stop "a copy never ends"
  mount -t ext4 "/dev/sda$target" /root
  report defender-disabled
  echo specialize >/root/pass
  umount /root
  restart
}

restart() { sync; reboot -f; }

specialize() {
  find_discs
  say "Getting devices ready"
  run_script specialize.cmd
  [ "$(dd if=/answers/envd/machine.reg bs=1 count=2 2>/dev/null | od -An -tx1)" = " ff fe" ] || stop "machine.reg is not UTF-16"
  [ -n "$(answer specialize/Microsoft-Windows-Shell-Setup/TimeZone)" ] || stop "no time zone"
  echo first-logon >/root/pass
  umount /root
  restart
}

first_logon() {
  find_discs
  user=$(answer $shell/UserAccounts/LocalAccounts/LocalAccount/Name)
  [ "$(answer $shell/AutoLogon/Username)" = "$user" ] || stop "the user of the automatic logon does not exist"
  password=$(answer $shell/AutoLogon/Password/Value)
  [ "$(answer $shell/UserAccounts/LocalAccounts/LocalAccount/Password/Value)" = "$password" ] || stop "wrong password"
  case $(echo "$password" | base64 -d | tr -d '\000') in
    ?????????*Password) ;;
    *) stop "the password is not in the form that Setup reads" ;;
  esac
  say "Welcome, $user"
  [ -f /answers/envd/first-logon.cmd ] || stop "first-logon.cmd is missing"
  failures=
  tr -d '\r' </answers/envd/first-logon.ps1 | sed -n "s/.*Invoke-Step '\([a-z-]*\)'.*/\1/p" | grep -v defender >/tmp/steps
  for step in $(cat /tmp/steps); do
    say "$step"
    report "$step"
    case $step in
      drivers)
        for driver in $(tr -d ' ",' </answers/envd/manifest.json | sed -n '/"*drivers/,/]/p' | grep -v '[][]'); do
          ls /answers/envd/drivers/$driver/*.inf >/dev/null 2>&1 || failures='"drivers: '$driver' is missing"'
        done
        ;;
      agent) [ -f /answers/envd/qemu-ga-x86_64.msi ] || failures='"agent: no installer"' ;;
      settings) sleep 10 ;; # Windows takes minutes; a build takes a picture every two seconds.
    esac
  done
  [ "$fault" = failed-step ] && failures='"program a.exe: ended with status 5"'
  printf '\357\273\277{ "failures": [%s], "build": 26200 }\r\n' "$failures" >'/root/C:\ProgramData\envd\result.json'
  printf 'steps: %s\r\n' "$(tr '\n' ' ' </tmp/steps)" >'/root/C:\ProgramData\envd\install.log'
  echo "${fault:-none}" >/root/fault
  echo desktop >/root/pass
  report finished
  umount /root
  sync
  poweroff -f
}

desktop() {
  say "Desktop $(cat /sys/class/graphics/fb0/virtual_size)"
  starts=$(($(cat /root/starts 2>/dev/null || echo 0) + 1))
  echo $starts >/root/starts
  sync
  say "Start $starts"
  [ "$(cat /root/fault)" = no-agent ] && while :; do sleep 1000; done
  if [ "$(cat /root/fault)" = restless ]; then
    while :; do printf '\033[4%dm\033[2Jrestless' $((i = (i + 1) % 7)); sleep 0.3; done &
  fi
  for directory in dev proc sys; do mount --bind /$directory /root/$directory; done
  # The agent's shutdown.
  printf '#!/bin/sh\n/bin/busybox sync\n/bin/busybox mount -o remount,ro /\n/bin/busybox poweroff -f\n' >/root/sbin/shutdown
  chmod 755 /root/sbin/shutdown
  port=$(ls /dev/vport* | head -n 1)
  while :; do chroot /root /usr/sbin/qemu-ga --method=virtio-serial --path="$port" || sleep 1; done
}

# The disk's driver takes a moment, and a new disk has no partitions.
until [ -b /dev/sda ]; do sleep 0.2; done
if [ -b /dev/sda3 ] && mount -t ext4 /dev/sda3 /root 2>/dev/null; then
  case $(cat /root/pass) in
    specialize) specialize ;;
    first-logon) first_logon ;;
    desktop) desktop ;;
  esac
fi
install
