set -eu
root="${1%/}"
# In a build of a container image the root is this script's own.
run() { if [ -n "$root" ]; then chroot "$root" "$@"; else "$@"; fi; }
run useradd --create-home --shell /bin/bash user
# No password: only the desktop session uses the account, never a login.
run usermod --lock user
run chown -R user:user /home/user
# Not empty: systemd would treat the boot as the first and enable units for seconds. The kernel command line sets each
# machine's own id.
echo 00000000000000000000000000000001 > "$root/etc/machine-id"
# Compiled once at build, instead of by every guest at every start.
run python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/envd
# Without a cache every program of the session first scans hundreds of fonts.
run env -u SOURCE_DATE_EPOCH fc-cache --force --system-only
ls "$root"/var/cache/fontconfig/*.cache-* >/dev/null
if [ -e "$root/usr/sbin/update-initramfs" ]; then
	echo desktop > "$root/etc/hostname"
	printf '127.0.0.1 localhost desktop\n::1 localhost\n' > "$root/etc/hosts"
	run systemctl enable envd-desktop.service
	if [ -d "$root/usr/lib/envd/guestd" ]; then run systemctl enable envd-guestd.socket envd-guestd.service; fi
	run systemctl enable qemu-guest-agent.service >/dev/null 2>&1 || true
	run systemctl set-default multi-user.target
	run systemctl mask __MASKED__ >/dev/null 2>&1
	run update-initramfs -u
fi
if [ -e "$root/usr/lib/envd/customize" ]; then run /usr/lib/envd/customize; fi
script=/usr/lib/envd/user-script
if [ -e "$root$script" ]; then
	echo 'envd: script: started'
	run $script || { echo "envd: script: failed with status $?"; exit 1; }
	rm "$root$script"
	run chown -R user:user /home/user
fi
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/tmp/*
