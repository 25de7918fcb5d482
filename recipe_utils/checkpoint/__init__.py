"""Step checkpoints, from which training resumes, and exported models."""
