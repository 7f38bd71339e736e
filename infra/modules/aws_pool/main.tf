locals {
  name            = "${var.service}-${var.pool}"
  model_bucket    = split("/", trimprefix(var.model_source, "s3://"))[0]
  model_prefix    = trimsuffix(trimprefix(var.model_source, "s3://${local.model_bucket}/"), "/")
  registry_prefix = var.registry_prefix == "" ? "" : "${var.registry_prefix}/"
  arn             = "arn:${data.aws_partition.current.partition}"
  parameter_arn   = "${local.arn}:ssm:${data.aws_region.current.region}:${data.aws_caller_identity.current.account_id}:parameter${var.secret_parameter}"
  group_arn       = "${local.arn}:autoscaling:${data.aws_region.current.region}:${data.aws_caller_identity.current.account_id}:autoScalingGroup:*:autoScalingGroupName/${local.name}"

  tags = merge(var.tags, {
    Name              = local.name
    "garnish:service" = var.service
    "garnish:pool"    = var.pool
  })

  user_data = templatefile("${path.module}/user_data.sh.tftpl", {
    region           = data.aws_region.current.region
    pool             = var.pool
    group            = local.name
    devices          = join(" ", var.devices)
    gateway_url      = var.gateway_url
    node_port        = var.node_port
    secret_parameter = var.secret_parameter
    package          = var.package
    model_source     = var.model_source
    node_file        = base64encode(var.node_file)
    drain_seconds    = var.drain_seconds
  })
}

data "aws_region" "current" {}

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

data "aws_ssm_parameter" "image" {
  name = var.image_parameter
}

# Which device is the root volume differs between images; another one's mapping would leave the root as it is.
data "aws_ami" "image" {
  filter {
    name   = "image-id"
    values = [data.aws_ssm_parameter.image.insecure_value]
  }
}

resource "aws_security_group" "node" {
  name_prefix = "${local.name}-"
  description = "Garnish nodes of ${local.name}: reached by the gateway alone."
  vpc_id      = var.vpc_id

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "gateway" {
  security_group_id            = aws_security_group.node.id
  description                  = "The gateway calls nodes."
  referenced_security_group_id = var.gateway_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = var.node_port
  to_port                      = var.node_port + max(var.devices...)
}

resource "aws_vpc_security_group_egress_rule" "all" {
  security_group_id = aws_security_group.node.id
  description       = "Nodes call the gateway, S3, SSM and the package index."
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

resource "aws_iam_role" "node" {
  name_prefix = "${substr(local.name, 0, 36)}-"
  description = "Garnish nodes of ${local.name}."
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ec2.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

# Nodes read artifacts and never write: no Put, no Delete, no other prefix.
resource "aws_iam_role_policy" "node" {
  name = "node"
  role = aws_iam_role.node.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid      = "ReadRegistry"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${local.arn}:s3:::${var.registry_bucket}/${local.registry_prefix}*"]
        },
        {
          Sid       = "ListRegistry"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = ["${local.arn}:s3:::${var.registry_bucket}"]
          Condition = { StringLike = { "s3:prefix" = ["${local.registry_prefix}*"] } }
        },
        {
          Sid      = "ReadModel"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${local.arn}:s3:::${local.model_bucket}/${local.model_prefix}/*"]
        },
        {
          Sid       = "ListModel"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = ["${local.arn}:s3:::${local.model_bucket}"]
          Condition = { StringLike = { "s3:prefix" = ["${local.model_prefix}/*"] } }
        },
        {
          Sid      = "ReadClusterSecret"
          Effect   = "Allow"
          Action   = ["ssm:GetParameter"]
          Resource = [local.parameter_arn]
        },
        {
          Sid      = "EndDrain"
          Effect   = "Allow"
          Action   = ["autoscaling:CompleteLifecycleAction", "autoscaling:RecordLifecycleActionHeartbeat"]
          Resource = [local.group_arn]
        },
        {
          Sid      = "ReadPackage"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${local.arn}:s3:::${trimprefix(var.package, "s3://")}"]
        },
      ],
      var.secret_kms_key_arn == null ? [] : [{
        Sid       = "DecryptClusterSecret"
        Effect    = "Allow"
        Action    = ["kms:Decrypt"]
        Resource  = [var.secret_kms_key_arn]
        Condition = { StringEquals = { "kms:ViaService" = "ssm.${data.aws_region.current.region}.amazonaws.com" } }
      }],
    )
  })
}

resource "aws_iam_instance_profile" "node" {
  name_prefix = "${substr(local.name, 0, 36)}-"
  role        = aws_iam_role.node.name
}

resource "aws_launch_template" "node" {
  name_prefix            = "${local.name}-"
  description            = "Garnish nodes of ${local.name}."
  image_id               = data.aws_ssm_parameter.image.insecure_value
  instance_type          = var.instance_type
  user_data              = base64encode(local.user_data)
  update_default_version = true
  vpc_security_group_ids = [aws_security_group.node.id]

  iam_instance_profile {
    arn = aws_iam_instance_profile.node.arn
  }

  # IMDSv2 only, and out of reach for containers on the instance.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  block_device_mappings {
    device_name = data.aws_ami.image.root_device_name

    ebs {
      volume_size           = var.volume_gib
      volume_type           = "gp3"
      encrypted             = "true"
      delete_on_termination = "true"
    }
  }

  monitoring {
    enabled = true
  }

  tag_specifications {
    resource_type = "instance"
    tags          = local.tags
  }

  tag_specifications {
    resource_type = "volume"
    tags          = local.tags
  }

  lifecycle {
    create_before_destroy = true

    precondition {
      condition     = length(base64encode(local.user_data)) <= 21844
      error_message = "The user data is over AWS's limit of 16 KiB; state fewer settings under node."
    }
  }
}

resource "aws_autoscaling_group" "nodes" {
  name                      = local.name
  min_size                  = var.min
  max_size                  = var.max
  desired_capacity          = var.desired
  vpc_zone_identifier       = var.subnet_ids
  target_group_arns         = var.target_group_arns
  health_check_type         = "EC2"
  health_check_grace_period = 600
  # Terraform need not wait for GPUs that AWS may not have right now: `garnish infra show` tells what there is.
  wait_for_capacity_timeout = "0"

  launch_template {
    id      = aws_launch_template.node.id
    version = aws_launch_template.node.latest_version
  }

  # From the first instance on: a hook that came later would miss those.
  initial_lifecycle_hook {
    name                 = "drain"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = var.drain_seconds
    default_result       = "CONTINUE"
  }

  # The provider's default tags reach neither the group nor what it starts.
  dynamic "tag" {
    for_each = local.tags

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  # Destroyed, it waits until the last instance has drained.
  timeouts {
    delete = "${ceil(var.drain_seconds / 60) + 10}m"
  }

  # What instances need is there before the first of them, and until the last one has drained.
  depends_on = [
    aws_iam_role_policy.node,
    aws_vpc_security_group_ingress_rule.gateway,
    aws_vpc_security_group_egress_rule.all,
  ]
}
