"""One module per group of public routes; each exports `routes`, a list that `gateway.app` mounts."""
