"""The commands of ``engine-serve`` besides serving: run-batch, bench, complete, chat."""
