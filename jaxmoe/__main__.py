"""`python -m jaxmoe` is the command `jaxmoe`."""

from jaxmoe.cli.app import main

if __name__ == "__main__":
    main()
