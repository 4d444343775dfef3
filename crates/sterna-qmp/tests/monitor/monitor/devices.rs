//! Tests `query-block`, `block_resize` and `announce-self`.

use serde_json::{Value, json};

use super::support::{ClientExt, Monitor};

#[test]
fn disks_are_listed_and_made_longer_by_their_names() {
    let (monitor, mut client) = Monitor::running().client_of();
    assert_eq!(client.ok("query-block", Value::Null), json!([]));
    let refused = client.refused("block_resize", json!({"device": "disk0", "size": 4096}));
    assert!(refused.contains("device='disk0'"), "{refused}");
    monitor.vm.disks.lock().unwrap().push(("a.img", 1024));
    monitor.vm.disks.lock().unwrap().push(("b.img", 2048));
    let list = client.ok("query-block", Value::Null);
    assert_eq!((&list[1]["device"], list.as_array().unwrap().len()), (&json!("disk1"), 2));
    let inserted = &list[1]["inserted"];
    assert_eq!(
        (&inserted["file"], &inserted["ro"], &inserted["drv"]),
        (&json!("b.img"), &json!(false), &json!("qcow2"))
    );
    assert_eq!(inserted["image"]["virtual-size"], 2048);
    assert_eq!((&inserted["backing_file"], &inserted["backing_file_depth"]), (&json!("c.img"), &json!(1)));

    client.ok("block_resize", json!({"device": "disk1", "size": 4096}));
    client.ok("block_resize", json!({"node-name": "disk0", "size": 8192}));
    assert_eq!(*monitor.vm.disks.lock().unwrap(), [("a.img", 8192), ("b.img", 4096)]);
    for (arguments, says) in [
        (json!({"device": "disk0", "node-name": "disk0", "size": 1}), "either"),
        (json!({"size": 1}), "either"),
        (json!({"device": "disk2", "size": 1}), "disk2"),
        (json!({"device": "disk01", "size": 1}), "disk01"),
        (json!({"device": "disk0", "size": -1}), "not negative"),
        (json!({"device": "disk0"}), "size"),
    ] {
        let refused = client.refused("block_resize", arguments);
        assert!(refused.contains(says), "{refused}");
    }
}

#[test]
fn announcement_follows_parameters_and_the_command() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate-set-parameters", json!({"announce-initial": 7, "announce-rounds": 0}));
    assert_eq!(monitor.vm.announced(), ["[]  7 ms, 550 ms, 0, 100 ms"]);
    let numbers = json!({"initial": 1, "max": 2, "rounds": 3, "step": 4});
    let with = |name: &str, value: Value| {
        let mut arguments = numbers.clone();
        arguments[name] = value;
        arguments
    };
    client.ok("announce-self", numbers.clone());
    let mut named = with("interfaces", json!(["net1", "net0"]));
    named["id"] = json!("mine");
    client.ok("announce-self", named);
    assert_eq!(monitor.vm.announced(), ["[]  1 ms, 2 ms, 3, 4 ms", "[1, 0] mine 1 ms, 2 ms, 3, 4 ms"]);
    for (arguments, says) in [
        (with("initial", json!(100_001)), "'initial'"),
        (with("max", json!(-1)), "'max'"),
        (with("rounds", json!(1001)), "'rounds'"),
        (with("step", json!(0)), "'step'"),
        (with("interfaces", json!(["eth0"])), "'net0'"),
        (json!({"initial": 1, "max": 2, "rounds": 3}), "step"),
    ] {
        let refused = client.refused("announce-self", arguments);
        assert!(refused.contains(says), "{refused}");
    }
    assert!(monitor.vm.announced().is_empty());
}
