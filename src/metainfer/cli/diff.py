"""x"""
def diff() -> None:
    """x"""
