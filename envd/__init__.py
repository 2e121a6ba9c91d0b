"""envd: a KVM host as a pool of forkable desktops behind one gRPC service."""
