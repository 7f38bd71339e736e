variables {
  service  = "demo"
  pool     = "here"
  desired  = 2
  max      = 3
  program  = ["sh", "-c", "exit 0"]
  revision = "1"
  host = {
    service_file = "/srv/serverless.yml"
    state        = "/srv/state"
    gateway_url  = "http://127.0.0.1:8080"
    secret_file  = "/srv/state/cluster.secret"
    registry     = "/srv/state/registry"
  }
}

run "makes_as_many_nodes_as_desired" {
  command = apply

  assert {
    condition     = output.nodes == tolist(["here-1", "here-2"])
    error_message = "Expected the nodes here-1 and here-2."
  }

  assert {
    condition     = jsondecode(terraform_data.node["here-2"].output.spec).node == "here-2"
    error_message = "Each node is told its own id."
  }
}

run "keeps_ids_when_it_grows" {
  command = apply

  variables {
    desired = 3
  }

  assert {
    condition     = tolist(slice(output.nodes, 0, 2)) == run.makes_as_many_nodes_as_desired.nodes
    error_message = "The nodes that were there keep their ids."
  }
}

run "tells_the_next_start_of_others_on_the_host" {
  command = apply

  variables {
    desired    = 3
    host_nodes = 4
  }

  assert {
    condition     = jsondecode(terraform_data.node["here-1"].output.spec).host_nodes == 4
    error_message = "Its next start takes the new share."
  }
}

run "may_be_empty" {
  command = plan

  variables {
    desired = 0
  }

  assert {
    condition     = length(output.nodes) == 0
    error_message = "Expected no node."
  }
}

run "refuses_more_than_its_bound" {
  command = plan

  variables {
    desired = 4
  }

  expect_failures = [var.desired]
}

run "refuses_bounds_the_wrong_way_round" {
  command = plan

  variables {
    min     = 3
    desired = 2
  }

  expect_failures = [var.desired]
}

run "refuses_a_relative_path" {
  command = plan

  variables {
    host = {
      service_file = "serverless.yml"
      state        = "/srv/state"
      gateway_url  = "http://127.0.0.1:8080"
      secret_file  = "/srv/state/cluster.secret"
      registry     = "/srv/state/registry"
    }
  }

  expect_failures = [var.host]
}

run "refuses_a_bad_name" {
  command = plan

  variables {
    pool = "Here!"
  }

  expect_failures = [var.pool]
}
