"""Desktops in containers of an OCI runtime, at native speed, on hosts with and without KVM.

`holder.py` is a program of its own, which owns the namespaces; `init.sh` is the first process of each container.
"""
