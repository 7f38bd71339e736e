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
  gpus                      = 4
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

  expect_failures = [var.max, var.desired]
}

run "refuses_a_package_that_is_not_pinned" {
  command = plan

  variables {
    package = "garnish"
  }

  expect_failures = [var.package]
}
