"""Update steps: the data of one optimizer step, decided on the CPU before its first forward."""
