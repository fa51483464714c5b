EXAMPLE=""
def doctor() -> None:
    """x"""
