"""What a training leaves on the disk to go on from, and the models it exports."""
