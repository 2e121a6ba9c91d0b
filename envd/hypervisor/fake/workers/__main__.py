"""A worker process: `python -m envd.hypervisor.fake.workers DESCRIPTOR NAME`, started by the daemon."""

import sys

import uvloop

from envd.hypervisor.fake.workers.worker import serve

uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
