"""One endpoint over several daemons, each with a part of the pools: a front process and its shards."""
