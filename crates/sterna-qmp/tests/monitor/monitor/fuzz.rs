//! Tests arbitrary bytes: no panic, bounded memory, and a monitor that still answers.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use serde_json::{Value, json};
use sterna_qmp::framing::{Frame, Framer, to_line};

use super::support::{ClientExt, LIMIT, Monitor};

fn frames_of(chunks: &[&[u8]]) -> Vec<Frame> {
    let (mut framer, mut frames) = (Framer::new(1 << 10), VecDeque::new());
    chunks.iter().for_each(|chunk| framer.push(chunk, &mut frames));
    frames.into()
}

/// Bytes that reach deep parser states more often than random ones.
fn likely_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => prop::sample::select(vec![
            &b"{"[..], b"}", b"[", b"]", b"\"", b"'", b"\\", b":", b",", b"\n", b" ", b"\xff", b"\x01", b"1e9",
            b"{\"execute\":", b"\"migrate\"", b"\"migrate-set-parameters\"", b"\"arguments\":{", b"\"uri\":",
            b"\"human-monitor-command\"", b"\"command-line\":", b"\"migrate_set_parameter x 1\"", b"null",
            b"\"qmp_capabilities\"", b"\"id\":", b"\xc3\xa9", b"\\u00e9", b"-1", b"18446744073709551616",
        ]).prop_map(<[u8]>::to_vec),
        1 => prop::collection::vec(any::<u8>(), 0..8),
    ];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[a-z-]{0,8}", inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn framer_gives_the_same_frames_however_bytes_are_cut(bytes in likely_bytes(), cut in any::<prop::sample::Index>()) {
        let cut = cut.index(bytes.len() + 1);
        let (head, tail) = bytes.split_at(cut);
        prop_assert_eq!(frames_of(&[&bytes]), frames_of(&[head, tail]));
    }

    #[test]
    fn framer_reads_what_to_line_wrote(value in json_value()) {
        let message = json!({"m": value});
        let line = to_line(&message);
        prop_assert!(line.is_ascii());
        let (mut framer, mut frames) = (Framer::new(1 << 20), VecDeque::new());
        framer.push(&line, &mut frames);
        prop_assert_eq!(Vec::from(frames), vec![Frame::Value(message)]);
    }

    #[test]
    fn framer_recovers_after_any_bytes_once_reset(bytes in likely_bytes()) {
        let frames = frames_of(&[&bytes, b"\xff", b"{\"execute\":\"stop\"}"]);
        prop_assert_eq!(frames.last(), Some(&Frame::Value(json!({"execute": "stop"}))));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_arguments_to_any_command_are_answered(arguments in json_value(), nested in json_value()) {
        let (_monitor, mut client) = Monitor::running().client_of();
        let names = client.ok("query-commands", Value::Null);
        for name in names.as_array().unwrap().iter().filter_map(|entry| entry["name"].as_str()) {
            let mut shapes = vec![arguments.clone()];
            for key in ["uri", "channels", "capabilities", "state", "command-line", "guest", "fdname"] {
                shapes.push(json!({ key: nested }));
            }
            shapes.push(json!({"channels": [{"channel-type": "main", "addr": nested}]}));
            shapes.push(json!({"command-line": format!("migrate_set_parameter {nested}")}));
            for shape in shapes {
                // A refusal is a valid answer. A broken connection is not.
                if let Err(error) = client.execute(name, shape) {
                    prop_assert!(matches!(error, sterna_qmp::ClientError::Refused { .. }), "{}: {}", name, error);
                }
            }
        }
    }
}

/// All cases use the same monitor, which must survive all of them.
#[test]
fn server_survives_random_bytes_from_many_clients() {
    let monitor = Monitor::running();
    let mut runner = proptest::test_runner::TestRunner::default();
    runner
        .run(&likely_bytes(), |bytes| {
            let mut raw = UnixStream::connect(&monitor.path).unwrap();
            raw.set_read_timeout(Some(LIMIT)).unwrap();
            let _ = raw.write_all(b"{\"execute\":\"qmp_capabilities\"}");
            let _ = raw.write_all(&bytes);
            let _ = raw.shutdown(std::net::Shutdown::Write);
            // The server answers the valid commands and closes the connection.
            raw.read_to_end(&mut Vec::new()).unwrap();
            Ok(())
        })
        .unwrap();
    monitor.client().ok("query-status", Value::Null);
}
