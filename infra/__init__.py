"""Node pools: creates and ends the nodes that serverless.yml declares, with Terraform.

`stack` has the types of the desired state. `render` writes that state as a Terraform root module, which uses the
hand-written modules in `modules/`. `workspace` plans, applies and destroys through `terraform`. `processes` finds and
ends the processes of the backend `local`. It identifies them by a pid file, or by a tag in their environment. The
folders `systemd` and `container` have files to install the gateway and nodes.
"""
