"""Node pools: from what serverless.yml declares to machines, with Terraform as the engine.

`stack` has the desired state, `render` writes it as a Terraform root module over the hand-written ones in `modules/`,
and `workspace` plans, applies and destroys through `terraform`. `processes` finds and ends what the backend `local`
started, by pid file or by the tag in its environment, and never anything else. The folders `systemd` and `container`
hold how gateway and node are installed.
"""
