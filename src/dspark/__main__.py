"""`python -m dspark`: the same as the command `dspark`."""

from dspark.cli import main

if __name__ == "__main__":
    main()
