"""Machines: the protocol, the libvirt driver, the fake, images."""

import os

# Before libvirt is loaded, by whichever module: it reads this then, and once more between fork and exec of a QEMU. Set
# in between, what it opens there closes a pipe of its own, and no QEMU starts. The embedded driver would tell our
# standard error about every tainted domain and every cgroup that is not there; what fails reaches us as exceptions.
# Set it to 1:stderr to see what libvirt does.
os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", "4:file:/dev/null")
