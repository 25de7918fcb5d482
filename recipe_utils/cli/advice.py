"""Advice at the end of a stopped or failed training."""


def how_to_resume(checkpoint: str, resumes: bool | str) -> str:
    """Returns how to continue from a ``checkpoint``, such as ``step_40``.

    ``resumes`` is the value of ``resume_from_checkpoint``, with which the command ran.
    """
    return f"the same command{'' if resumes else ' with resume_from_checkpoint=True'} continues from {checkpoint}"
