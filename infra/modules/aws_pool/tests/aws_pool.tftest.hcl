mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { region = "eu-central-1" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_ssm_parameter" {
    defaults = { insecure_value = "ami-0123456789abcdef0" }
  }
  mock_data "aws_ami" {
    defaults = { root_device_name = "/dev/sda1" }
  }
  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/node" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
}

variables {
  service                   = "demo"
  pool                      = "l40s"
  instance_type             = "g6e.12xlarge"
  devices                   = [0, 1, 3]
  min                       = 0
  desired                   = 1
  max                       = 8
  vpc_id                    = "vpc-1"
  subnet_ids                = ["subnet-1"]
  gateway_security_group_id = "sg-1"
  gateway_url               = "http://gateway.internal:8080"
  secret_parameter          = "/garnish/demo/cluster-secret"
  image_parameter           = "/acme/images/gpu"
  package                   = "s3://acme-packages/garnish-0.1.0-py3-none-any.whl"
  model_source              = "s3://acme-models/llama-8b"
  registry_bucket           = "acme-adapters"
  registry_prefix           = "prod"
  node_file                 = "{}"
}

run "is_hardened" {
  command = apply

  assert {
    condition     = aws_launch_template.node.metadata_options[0].http_tokens == "required"
    error_message = "IMDSv2 only."
  }

  assert {
    condition     = aws_launch_template.node.block_device_mappings[0].ebs[0].encrypted == "true"
    error_message = "Volumes must be encrypted."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.gateway.from_port == 8081 && aws_vpc_security_group_ingress_rule.gateway.to_port == 8084
    error_message = "A port per GPU, and no other."
  }

  assert {
    condition     = !strcontains(aws_iam_role_policy.node.policy, "s3:Put") && !strcontains(aws_iam_role_policy.node.policy, "\"*\"")
    error_message = "Nodes write nothing, and have no grant on everything."
  }

  assert {
    condition = toset(flatten([
      for statement in jsondecode(aws_iam_role_policy.node.policy).Statement : statement.Resource if contains(statement.Action, "s3:GetObject")
      ])) == toset([
      "arn:aws:s3:::acme-adapters/prod/*",
      "arn:aws:s3:::acme-models/llama-8b/*",
      "arn:aws:s3:::acme-packages/garnish-0.1.0-py3-none-any.whl",
    ])
    error_message = "Nodes read the registry's prefix, the model and the package, and no other object."
  }

  assert {
    condition = [
      for statement in jsondecode(aws_iam_role_policy.node.policy).Statement : statement.Resource if contains(statement.Action, "ssm:GetParameter")
    ] == [["arn:aws:ssm:eu-central-1:123456789012:parameter/garnish/demo/cluster-secret"]]
    error_message = "Nodes read one parameter, the cluster secret's."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.gateway.referenced_security_group_id == "sg-1" && aws_vpc_security_group_ingress_rule.gateway.cidr_ipv4 == null
    error_message = "Only the gateway reaches nodes."
  }

  assert {
    condition     = aws_autoscaling_group.nodes.min_size == 0 && aws_autoscaling_group.nodes.desired_capacity == 1 && aws_autoscaling_group.nodes.max_size == 8
    error_message = "The group has the pool's bounds and size."
  }

  assert {
    condition     = one(aws_autoscaling_group.nodes.initial_lifecycle_hook).lifecycle_transition == "autoscaling:EC2_INSTANCE_TERMINATING"
    error_message = "Instances drain before they go."
  }
}

run "leaves_the_size_to_an_autoscaler" {
  command = plan

  variables {
    desired = null
  }

  assert {
    condition     = aws_autoscaling_group.nodes.max_size == 8
    error_message = "The bounds stay."
  }
}

run "refuses_bounds_the_wrong_way_round" {
  command = plan

  variables {
    min = 9
  }

  expect_failures = [var.max]
}

run "refuses_a_size_out_of_bounds" {
  command = plan

  variables {
    desired = 9
  }

  expect_failures = [var.desired]
}

run "refuses_a_package_of_the_index" {
  command = plan

  variables {
    package = "garnish==0.1.0"
  }

  expect_failures = [var.package]
}
