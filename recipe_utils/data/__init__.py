"""Data loading on the CPU, ahead of the loop: samples -> plan -> collate -> count -> queue."""
