"""The gRPC service: the contract's wire on one side, the episode service on the other."""

import os

# libvirt's embedded driver forks in this process to start QEMU. grpc's fork handlers would bring its threads up in the
# child, which then abort ("epoll_wait error: Bad file descriptor") when libvirt closes inherited files before its exec.
# grpc reads this when it starts, so after this line and before the first channel or server.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
