"""How gateway and node are installed: systemd units and a Containerfile. Node pools are not built yet."""
