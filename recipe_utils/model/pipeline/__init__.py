"""Pipeline stages and schedules."""
