//! The numbers in specs/extension.md §1 are the numbers in the code: all of them, and no others.

use std::collections::BTreeSet;

use sterna_wire::extension::{
    COMPATIBILITY_PING, CONFIGURATION_PING, ConfigurationRefusal, DEVICE_STREAMS_PING, EXTENSION_PING,
    FENCE_PING, Features, KEEPALIVE_PING, MEMORY_PING, MemoryOffer, POSTCOPY_STARTED_PING, PREPARE_PING,
    PreemptHello, RECONNECT_PING, ROUND_PING, ReconnectHello, SHUT_PAGE_FAILED, SHUT_PAUSED,
    STREAMS_ANEW_PING, StatusQuestion,
};
use sterna_wire::nbd::DiskHello;
use sterna_wire::replica;
use sterna_wire::return_path::ReturnMessage;

/// The text of §1 without the text before and after.
fn section() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../specs/extension.md");
    let text = std::fs::read_to_string(path).unwrap();
    let after = text.split_once("\n## 1. ").unwrap().1;
    after.split_once("\n## 2. ").unwrap().0.to_owned()
}

/// The texts in backticks in the first cell of each row. The table is the one whose head begins with `head`.
fn numbers(section: &str, head: &str) -> BTreeSet<String> {
    let table = section.split_once(&format!("\n| {head} |")).unwrap().1;
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

#[test]
fn every_ping_stands_in_the_table_and_no_other() {
    let pings = [
        EXTENSION_PING,
        FENCE_PING,
        PREPARE_PING,
        COMPATIBILITY_PING,
        KEEPALIVE_PING,
        DEVICE_STREAMS_PING,
        RECONNECT_PING,
        ROUND_PING,
        STREAMS_ANEW_PING,
        MEMORY_PING,
        CONFIGURATION_PING,
        POSTCOPY_STARTED_PING,
    ];
    let known: BTreeSet<_> = pings.iter().map(|ping| format!("{ping:08x}")).collect();
    assert_eq!(known.len(), pings.len(), "two have one number");
    assert_eq!(numbers(&section(), "PING"), known);
}

#[test]
fn every_magic_stands_in_the_table_and_no_other() {
    let disk = *DiskHello::BYTES.first_chunk::<4>().unwrap();
    let magics = [
        StatusQuestion::MAGIC,
        MemoryOffer::MAGIC,
        PreemptHello::MAGIC,
        ReconnectHello::MAGIC,
        replica::Hello::MAGIC,
        disk,
    ];
    let known: BTreeSet<_> =
        magics.iter().map(|magic| format!("{:08x}", u32::from_be_bytes(*magic))).collect();
    assert_eq!(known.len(), magics.len(), "two have one number");
    assert_eq!(numbers(&section(), "first bytes of a connection"), known);
    for magic in magics {
        let word = String::from_utf8(magic.to_vec()).unwrap();
        assert!(section().contains(&format!("(\"{word}\")")), "{word}");
    }
}

#[test]
fn every_feature_bit_stands_in_the_table_and_no_other() {
    let features = [
        Features::DEVICE_STREAMS,
        Features::HANDOVER,
        Features::POSTCOPY,
        Features::PREEMPT,
        Features::RECONNECT,
        Features::POSTCOPY_LANES,
        Features::MEMORY,
        Features::CONFIGURATION,
    ];
    // An older Sterna uses bit 0.
    let mut known = BTreeSet::from([0]);
    known.extend(features.iter().map(|feature| feature.0.trailing_zeros()));
    assert_eq!(known.len(), features.len() + 1, "two have one bit");
    assert!(features.iter().all(|feature| feature.0.count_ones() == 1));
    let table = section().split_once("\n| bit |").unwrap().1.to_owned();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let stated: BTreeSet<u32> =
        rows.map(|row| row.split('|').nth(1).unwrap().trim().parse().unwrap()).collect();
    assert_eq!(stated, known);
}

#[test]
fn every_word_of_the_return_path_stands_in_the_table() {
    let section = section();
    let number = |message: ReturnMessage| {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        format!("{:02x}{:02x}", bytes[0], bytes[1])
    };
    let grant = number(ReturnMessage::Grant { device: "d".into(), instance: 0, bytes: 0 });
    let refusal = number(ReturnMessage::ConfigurationRefused(ConfigurationRefusal::Other("o".into())));
    let pong = format!("{:04x}", Features::OURS.to_pong() >> 16);
    assert_eq!(numbers(&section, "return path"), BTreeSet::from([grant, refusal, pong]));
    for value in [SHUT_PAUSED, SHUT_PAGE_FAILED] {
        assert!(section.contains(&format!("\n| type 1 (SHUT) with {value} |")), "{value}");
    }
}
