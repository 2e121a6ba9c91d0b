"""One endpoint over several daemons, each with a part of the pools: a supervisor and its shards."""
