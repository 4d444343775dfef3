//! Tests the comparison of two monitors' settings for a migration over `rdma:`.

use serde_json::{Map, Value, json};
use sterna_drive::handover::ReturnPath;
use sterna_drive::rdma::{Needs, Wanted, compare};
use sterna_drive::{DriveError, Vm};

use super::drive::{Answer, Asked, monitor};

const MIB: u64 = 1 << 20;

/// The answers of a monitor about its VM.
#[derive(Clone)]
struct Say {
    is_sterna: bool,
    /// Chunk size in bytes. `None` for a QEMU before 11.1.
    chunk: Option<u64>,
    on: &'static [&'static str],
    tls: &'static str,
    listens: bool,
}

const QEMU: Say = Say { is_sterna: false, chunk: Some(MIB), on: &[], tls: "", listens: false };
const STERNA: Say = Say { is_sterna: true, on: &["return-path"], ..QEMU };

impl Say {
    fn vm(&self, at: &str) -> (Vm, Asked) {
        let say = self.clone();
        monitor(at, if self.is_sterna { "Sterna 0.2" } else { "" }, move |command, _| {
            Answer::Return(match command {
                "query-migrate-capabilities" => {
                    let names = ["return-path", "multifd", "xbzrle", "mapped-ram", "rdma-pin-all"];
                    names
                        .map(|name| json!({"capability": name, "state": say.on.contains(&name)}))
                        .to_vec()
                        .into()
                }
                "query-migrate-parameters" => {
                    let mut parameters = json!({"max-bandwidth": 77, "tls-creds": say.tls});
                    if let Some(chunk) = say.chunk {
                        parameters["x-rdma-chunk-size"] = chunk.into();
                    }
                    parameters
                }
                "query-migrate" if say.listens => json!({"status": "setup"}),
                _ => json!({}),
            })
        })
    }
}

/// Compares two VMs, with `caps` and the chunk size of the command line.
fn compared(
    source: Say,
    destination: Option<Say>,
    address: &str,
    caps: &[&str],
    chunk: Option<u64>,
) -> Result<Needs, String> {
    let (mut from, asked) = source.vm("SOURCE");
    let mut to = destination.map(|destination| destination.vm("DEST"));
    let capabilities: Vec<_> = caps.iter().map(|&name| (name.to_owned(), true)).collect();
    let parameters: Map<String, Value> =
        chunk.map(|chunk| ("x-rdma-chunk-size".to_owned(), chunk.into())).into_iter().collect();
    let wanted = Wanted { capabilities: &capabilities, parameters: &parameters, has_tls: false };
    let vm = to.as_mut().map(|(vm, _)| vm);
    let result = compare(&mut from, vm, &address.parse().unwrap(), wanted);
    for asked in [Some(&asked), to.as_ref().map(|(_, asked)| asked)].into_iter().flatten() {
        for command in ["migrate-set-parameters", "migrate-set-capabilities", "migrate-incoming", "migrate"] {
            assert_eq!(asked.count(command), 0, "{command} before all has been compared");
        }
    }
    result.map_err(|error| match error {
        DriveError::Unfit(why) => why,
        other => panic!("{other:?}"),
    })
}

const ADDRESS: &str = "rdma:h:4444";
const RETURN_PATH: &[&str] = &["return-path"];

#[test]
fn larger_chunks_at_the_source_are_refused_between_two_qemus_alone_and_the_sentence_mends_it() {
    let of = |say: Say, mib: u64| Say { chunk: Some(mib * MIB), ..say };
    for (from, to, fits) in [
        (of(QEMU, 1), of(QEMU, 1), true),
        (of(QEMU, 1), of(QEMU, 1024), true),
        (of(QEMU, 2), of(QEMU, 1), false),
        (of(QEMU, 64), of(QEMU, 8), false),
        (of(QEMU, 64), of(STERNA, 1), true),
        (of(STERNA, 64), of(QEMU, 1), true),
        (of(STERNA, 64), of(STERNA, 1), true),
        (of(QEMU, 2), Say { chunk: None, ..QEMU }, false),
        (Say { chunk: None, ..QEMU }, of(QEMU, 1), true),
    ] {
        let result = compared(from.clone(), Some(to.clone()), ADDRESS, &[], None);
        assert_eq!(result.is_ok(), fits, "{:?} to {:?}: {result:?}", from.chunk, to.chunk);
        // With pin-all the chunk sizes need not match, whether the VM or the command line sets it.
        compared(from.clone(), Some(to.clone()), ADDRESS, &["rdma-pin-all"], None).unwrap();
        compared(Say { on: &["rdma-pin-all"], ..from }, Some(to), ADDRESS, &[], None).unwrap();
    }
    let refusal = compared(of(QEMU, 64), Some(of(QEMU, 8)), ADDRESS, &[], None).unwrap_err();
    for word in ["64 MiB at SOURCE", "8 MiB at DEST", "`--set x-rdma-chunk-size=64M`", "rdma-pin-all"] {
        assert!(refusal.contains(word), "{word} in {refusal}");
    }
    let old = Say { chunk: None, ..QEMU };
    let refusal = compared(of(QEMU, 64), Some(old), ADDRESS, &[], None).unwrap_err();
    assert!(refusal.contains("QEMU 11.1.0 cannot change it"), "{refusal}");
    assert!(refusal.contains("`--set x-rdma-chunk-size=1M`"), "{refusal}");
}

#[test]
fn chunk_size_of_the_command_line_counts_for_a_side_that_will_get_it() {
    let from = Say { chunk: Some(2 * MIB), ..QEMU };
    compared(from.clone(), Some(QEMU), ADDRESS, &[], Some(64 * MIB)).expect("both get it");
    compared(from.clone(), Some(QEMU), ADDRESS, &[], Some(MIB)).expect("both get it");

    let listens = Say { listens: true, on: RETURN_PATH, ..QEMU };
    let refusal = compared(QEMU, Some(listens.clone()), ADDRESS, &[], Some(64 * MIB)).unwrap_err();

    assert!(refusal.contains("DEST listens already, so set it there to 67108864"), "{refusal}");
    // Pin-all is negotiated on the wire, and the source decides.
    compared(QEMU, Some(listens), ADDRESS, &["rdma-pin-all"], Some(64 * MIB)).unwrap();
    let old = Say { chunk: None, ..QEMU };
    assert!(compared(QEMU, Some(old), ADDRESS, &[], Some(64 * MIB)).is_err());
}

#[test]
fn capabilities_that_a_qemu_refuses_with_rdma_are_found_on_either_side() {
    for name in ["multifd", "xbzrle", "mapped-ram"] {
        let on: &'static [&'static str] = match name {
            "multifd" => &["return-path", "multifd"],
            "xbzrle" => &["return-path", "xbzrle"],
            _ => &["return-path", "mapped-ram"],
        };
        for (from, to, caps, fits) in [
            (QEMU, Some(QEMU), &[name][..], false),
            (STERNA, Some(QEMU), &[name], false),
            (QEMU, Some(STERNA), &[name], false),
            (QEMU, None, &[name], false),
            (Say { on, ..QEMU }, Some(QEMU), &[], false),
            (QEMU, Some(Say { on, ..STERNA }), &[], false),
            // Two Sternas check their settings themselves.
            (STERNA, Some(STERNA), &[name], true),
            (STERNA, None, &[name], true),
        ] {
            let result = compared(from, to, ADDRESS, caps, None);
            assert_eq!(result.is_ok(), fits, "{name}: {result:?}");
            let names_it = |why: &String| why.contains(name) && why.contains("QEMU 11.1.0");
            assert!(result.as_ref().err().is_none_or(names_it), "{result:?}");
        }
    }
}

#[test]
fn tls_is_refused_whichever_side_has_it() {
    let with_tls = |say: Say| Say { tls: "tls0", ..say };
    for (from, to, at) in [
        (with_tls(QEMU), Some(QEMU), "SOURCE"),
        (with_tls(STERNA), None, "SOURCE"),
        (STERNA, Some(with_tls(STERNA)), "DEST"),
    ] {
        let refusal = compared(from, to, ADDRESS, &[], None).unwrap_err();
        assert!(refusal.contains("TLS") && refusal.contains(at), "{refusal}");
    }
    let (mut from, _) = STERNA.vm("SOURCE");
    let wanted = Wanted { capabilities: &[], parameters: &Map::new(), has_tls: true };
    assert!(compare(&mut from, None, &ADDRESS.parse().unwrap(), wanted).is_err());
}

#[test]
fn qemu_as_destination_gets_a_port_and_the_return_path() {
    let on = Say { on: RETURN_PATH, ..QEMU };
    let listens = Say { listens: true, ..QEMU };
    let off = Say { on: &[], ..STERNA };
    let needs = |return_path_there, return_path| Needs { return_path_there, return_path };
    for (from, to, caps, needed) in [
        // A QEMU source keeps its setting, and a QEMU destination follows it.
        (QEMU, QEMU, &[][..], needs(false, ReturnPath::AsSet)),
        (QEMU, on.clone(), &[], needs(false, ReturnPath::AsSet)),
        (on.clone(), QEMU, &[], needs(true, ReturnPath::AsSet)),
        (QEMU, QEMU, &["return-path"], needs(false, ReturnPath::AsSet)),
        (QEMU, listens.clone(), &[], needs(false, ReturnPath::AsSet)),
        (STERNA, QEMU, &[], needs(true, ReturnPath::On)),
        (off.clone(), QEMU, &[], needs(false, ReturnPath::On)),
        (STERNA, on.clone(), &[], needs(false, ReturnPath::On)),
        (STERNA, Say { listens: true, ..on.clone() }, &[], needs(false, ReturnPath::On)),
        (off, listens.clone(), &[], needs(false, ReturnPath::On)),
        (QEMU, STERNA, &[], needs(false, ReturnPath::On)),
        (STERNA, STERNA, &[], needs(false, ReturnPath::On)),
    ] {
        assert_eq!(compared(from, Some(to), ADDRESS, caps, None), Ok(needed));
    }
    let refusal = compared(on, Some(listens), ADDRESS, &[], None).unwrap_err();
    assert!(refusal.contains("DEST listens without return-path"), "{refusal}");

    let refusal = compared(STERNA, Some(QEMU), "rdma:h:0", &[], None).unwrap_err();
    assert!(refusal.contains("a port above 0"), "{refusal}");
    compared(QEMU, Some(STERNA), "rdma:h:0", &[], None).unwrap();
}
