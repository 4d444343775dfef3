//! Postcopy whose source dies: what the destination's VM answers, and that it can be ended.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_qmp::{Client, Endpoint};

fn run(arguments: &[&str], socket: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(["run", "--machine=process", "--ram=64M", "--vcpus=4", "--fill=random", "--qmp", socket]);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn client(socket: &str) -> Client {
    let endpoint: Endpoint = socket.parse().unwrap();
    eventually("a monitor", || Client::connect(&endpoint, Duration::from_secs(10)).ok())
}

#[test]
fn guest_whose_source_dies_in_postcopy_waits_and_its_vm_answers_and_can_be_ended() {
    let directory = tempfile::tempdir().unwrap();
    let socket = |name: &str| format!("unix:{}", directory.path().join(name).display());
    let mut source = run(&[], &socket("a"));
    let mut destination = run(&["--incoming=defer"], &socket("b"));
    let (mut here, mut there) = (client(&socket("a")), client(&socket("b")));
    let on = json!({"capabilities": [{"capability": "postcopy-ram", "state": true}]});
    if there.execute("migrate-set-capabilities", on.clone()).is_err() {
        // This host forbids it.
        for child in [&mut source, &mut destination] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        return;
    }
    there.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"})).unwrap();
    let address = there.execute("query-migrate", json!({})).unwrap()["socket-address"][0].clone();
    let uri = format!("tcp:127.0.0.1:{}", address["port"].as_str().unwrap());
    here.execute("migrate-set-capabilities", on).unwrap();
    let slowly = json!({"max-bandwidth": 10_000_000, "max-postcopy-bandwidth": 100_000});
    here.execute("migrate-set-parameters", slowly).unwrap();
    here.execute("migrate", json!({"uri": uri})).unwrap();
    here.execute("migrate-start-postcopy", json!({})).unwrap();
    let status = |client: &mut Client| {
        client.execute("query-migrate", json!({})).unwrap()["status"].as_str().unwrap().to_owned()
    };
    eventually("postcopy", || (status(&mut there) == "postcopy-active").then_some(()));

    source.kill().unwrap();
    source.wait().unwrap();

    eventually("the pause", || (status(&mut there) == "postcopy-paused").then_some(()));
    assert!(there.execute("stop", json!({})).is_err(), "it would wait with the guest");
    assert!(there.execute("migrate_cancel", json!({})).is_err());
    there.execute("quit", json!({})).unwrap();
    let end = eventually("its end", || destination.try_wait().unwrap());
    assert_eq!(end.code(), Some(1), "the guest is lost");
}
