"""`python -m node_agent.api`: settings on standard input."""

from node_agent.api.app import main

if __name__ == "__main__":
    main()
