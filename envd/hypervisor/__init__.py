"""Machines: the protocol, the libvirt driver, the fake, images."""

import os

# Before libvirt is loaded, by whichever module, for it reads this then. The embedded driver would tell our standard
# error about every tainted domain and every cgroup that is not there; what fails reaches us as exceptions.
# Set it to 1:stderr to see what libvirt does.
os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", "4:file:/dev/null")
