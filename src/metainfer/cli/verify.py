"""x"""
def verify() -> None:
    """x"""
