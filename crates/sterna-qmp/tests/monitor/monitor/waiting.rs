//! Tests the monitor while `stop` waits for a vCPU that waits for a page. It must answer every client, also the one
//! that sent `stop`.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna::Vm;
use sterna::ram::Custody;

use super::support::{ClientExt, FakeVm, Monitor};

#[test]
fn stop_that_waits_for_a_page_lets_go_of_its_client_and_of_the_monitor() {
    let vm = FakeVm::new(true, true);
    let (began, begins) = channel();
    let (go_on, waits) = channel::<()>();
    *vm.at_stop.lock().unwrap() = Some(Box::new(move || {
        began.send(()).unwrap();
        waits.recv().unwrap();
    }));
    // The guest runs here in postcopy: its pages follow.
    let arriving = Custody::Arriving { is_free: true };
    let claim = vm.ram().claim_custody(arriving, Custody::may_arrive).unwrap();
    let monitor = Monitor::of(vm, true);
    let (mut first, mut second) = (monitor.client(), monitor.client());
    let stop = std::thread::spawn(move || {
        let said = first.refused("stop", Value::Null);
        (first, said)
    });
    begins.recv().unwrap();

    let since = Instant::now();
    assert_eq!(second.ok("query-status", Value::Null)["status"], "running");
    second.ok("query-migrate", Value::Null);
    second.ok("migrate-set-parameters", json!({"downtime-limit": 200}));
    // The connection is lost.
    claim.set(Custody::Arriving { is_free: false });
    second.refused("stop", Value::Null);
    second.ok("query-migrate", Value::Null);
    assert!(
        since.elapsed() < Duration::from_secs(4),
        "none of them waits for the first: {:?}",
        since.elapsed()
    );

    let (mut first, said) = stop.join().unwrap();
    assert!(said.contains("waits for a page") && said.contains("migrate-recover"), "{said}");
    assert_eq!(first.ok("query-status", Value::Null)["status"], "running", "not yet");
    // A new connection has brought the page.
    claim.set(arriving);
    go_on.send(()).unwrap();
    let until = Instant::now() + super::support::LIMIT;
    while first.ok("query-status", Value::Null)["status"] != "paused" {
        assert!(Instant::now() < until, "it takes effect");
        std::thread::sleep(Duration::from_millis(5));
    }
    first.ok("cont", Value::Null);
    assert_eq!(first.ok("query-status", Value::Null)["status"], "running");
}
