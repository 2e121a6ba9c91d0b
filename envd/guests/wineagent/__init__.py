"""The guest agent of a guest that tasks take for Windows: Debian with Wine.

Runs inside guests, with the standard library alone. It answers the commands of QEMU's guest agent as its build for
Windows does: `C:` is Wine's, and programs are Windows programs. Wine cannot run the host's PowerShell scripts, so they
are answered by name. A path that begins with `/` is Debian's, for the host's renewal of a fork's identity. The agent
also starts Wine's desktop, again each time it ends.
"""
