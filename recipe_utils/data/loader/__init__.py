"""Update steps: sampling, planning, counting and prefetching."""
