"""From a dataset to update steps, on the CPU and ahead of the loop: samples -> plan -> collate -> count -> queue."""
