"""The service that runs inside guests and gives the host access to the desktop session over HTTP.

It implements the HTTP API of OSWorld's in-guest server and adds routes under `/envd/`. It serves the user's X session
and contains no task or episode logic.

The directory is copied into images and runs there as `python3 -m guestd`, a service of the system: systemd holds its
port and restarts it, and only root can end it. It acts with the rights of the session's user, and so do its commands.

It imports the standard library, xcffib (Debian: python3-xcffib), and itself by relative imports. Of the rest of envd,
only the fake guest imports it: request parsing and responses, which need no xcffib.

Invariants:

- Every call ends: child processes have deadlines and die with their process group; lock waits are bounded (503).
- Calls to X and AT-SPI are serialised: parallel calls corrupt screenshots and hang OSWorld's own server.
- A POST with `X-Request-Id` has its effect once: a repeat within five minutes waits for or replays the first response.
- Without an X server, commands and files still work; routes that need X answer 500 with the reason.

Requests are not authenticated. The guest's network is user-mode, so only the host's loopback reaches the port. Requests
from web pages in the guest's browser are rejected by their `Origin` header.
"""

VERSION = "2"
