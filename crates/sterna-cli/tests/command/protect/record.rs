//! `sterna protect --report`: the record describes the protection, its end, and the guest's place.

use serde_json::{Value, json};

use super::{Pair, vm};
use crate::support::protection::{Process, Site, command, sterna};

/// A protection with `--report`, whose standby has held ten checkpoints.
fn recorded() -> Pair {
    let site = Site::new();
    let primary = site.start("a", vm(&site, "a").arg("--lease=1s"));
    let standby = site.start("b", vm(&site, "b").args(["--lease=1s", "--incoming=defer"]));
    let report = format!("--report={}", site.path("record.json").display());
    let protects = Process(site.protect("a", "b", &[&report]).spawn().unwrap());
    site.await_checkpoints("b", 10);
    Pair { site, primary, standby, protects }
}

/// Waits for the end of the command. Returns its exit status, the record, and the page of `sterna report`.
fn ended(pair: &mut Pair) -> (Option<i32>, Value, String) {
    let status = pair.protects.wait();
    let file = pair.path("record.json");
    let record = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let output = sterna().arg("report").arg(&file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (status, record, std::fs::read_to_string(file.with_extension("html")).unwrap())
}

fn states(record: &Value) -> Vec<&str> {
    record["changes"].as_array().unwrap().iter().filter_map(|change| change["state"].as_str()).collect()
}

#[test]
fn record_of_a_protection_that_an_operator_ended_has_its_checkpoints_and_the_guest_at_the_primary() {
    let mut pair = recorded();
    let held = pair.report("a")["held"].as_u64().unwrap();

    assert!(command("unprotect", &pair.socket("a"), &[]).status.success());

    let (status, record, page) = ended(&mut pair);
    assert_eq!(
        (status, &record["guest_at"], &record["state"]),
        (Some(0), &json!("primary"), &json!("alone"))
    );
    assert!(record["end"].as_str().unwrap().contains("an operator ended the protection"), "{record}");
    // The expected values are the primary's own counters.
    let report = pair.report("a");
    assert!(record["checkpoints"].as_u64().unwrap() >= held, "{record}");
    assert_eq!(
        (&record["checkpoints"], &record["transferred_bytes"]),
        (&report["held"], &report["transferred-bytes"])
    );
    let parts = record["parts"].as_array().unwrap();
    let sum = |name: &str| parts.iter().filter_map(|part| part[name].as_u64()).sum::<u64>();
    assert_eq!(
        (sum("checkpoints"), sum("sent_bytes")),
        (record["checkpoints"].as_u64().unwrap(), record["transferred_bytes"].as_u64().unwrap())
    );
    let (longest, truth) =
        (record["pause_longest_seconds"].as_f64().unwrap(), report["pause-most"].as_f64().unwrap());
    assert!((longest - truth).abs() < 1e-6, "{longest} for {truth}");
    assert!(
        parts.iter().any(|part| part["pause_seconds"].as_f64().is_some_and(|pause| pause > 0.0)),
        "{record}"
    );
    assert!(
        page.contains("<h1>Protection</h1>") && page.contains("an operator ended the protection"),
        "{page}"
    );
}

#[test]
fn record_of_a_lost_standby_says_who_won() {
    let mut pair = recorded();

    pair.standby.kill();

    let (status, record, page) = ended(&mut pair);
    assert_eq!((status, &record["guest_at"]), (Some(1), &json!("primary")));
    assert!(record["end"].as_str().unwrap().contains("the claim is won"), "{record}");
    assert_eq!(states(&record).last(), Some(&"alone"), "{record}");
    assert!(page.contains("the claim is won"), "{page}");
}

#[test]
fn record_of_a_planned_takeover_has_the_guest_at_the_standby() {
    let mut pair = recorded();

    assert!(command("takeover", &pair.socket("b"), &["--planned"]).status.success());

    let (status, record, _) = ended(&mut pair);
    assert_eq!(
        (status, &record["guest_at"], &record["state"]),
        (Some(0), &json!("standby"), &json!("handed over"))
    );
    assert!(
        states(&record).starts_with(&["seeding"]) || states(&record).starts_with(&["protected"]),
        "{record}"
    );
}

#[test]
fn record_of_a_primary_that_was_killed_does_not_say_who_has_the_guest() {
    let mut pair = recorded();

    pair.primary.kill();

    let (status, record, page) = ended(&mut pair);
    assert_eq!((status, &record["guest_at"]), (Some(3), &Value::Null));
    assert!(record["end"].as_str().unwrap().contains("find out whether the standby"), "{record}");
    assert!(page.contains("not decided"), "{page}");
}
