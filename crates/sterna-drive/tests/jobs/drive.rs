//! Tests jobs with simulated monitors, in situations that a real VM cannot be forced into.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use sterna_drive::handover::{Arrived, Handover, OnArrival, ReturnPath, StaysPaused};
use sterna_drive::restore::{RestoreRequest, Start, restore};
use sterna_drive::save::{SaveRequest, save};
use sterna_drive::{DriveError, Progress, Temporary, Vm, Watch, Wish};
use sterna_image::{Access, BlockShape, Envelope, MappedOptions, MappedWriter, Shape};
use sterna_qmp::Client;
use sterna_transport::Direct;

/// The reaction of a monitor to a command.
pub enum Answer {
    Return(Value),
    Refuse(&'static str),
    /// The monitor closes the connection.
    Close,
}

/// The commands that a monitor received, in order.
#[derive(Clone, Default)]
pub struct Asked(Arc<Mutex<Vec<String>>>);

impl Asked {
    pub fn count(&self, command: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|asked| *asked == command).count()
    }
}

/// The monitor of a QEMU, with the name `at`.
fn qemu(at: &str, answer: impl FnMut(&str, &Value) -> Answer + Send + 'static) -> (Vm, Asked) {
    monitor(at, "", answer)
}

/// A monitor with the name `at`, of a VM with this package version.
pub fn monitor(
    at: &str,
    package: &'static str,
    mut answer: impl FnMut(&str, &Value) -> Answer + Send + 'static,
) -> (Vm, Asked) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let asked = Asked::default();
    let notes = asked.clone();
    std::thread::spawn(move || {
        let version = json!({"qemu": {"major": 11, "minor": 1, "micro": 0}, "package": package});
        writeln!(theirs, "{}", json!({"QMP": {"version": version, "capabilities": []}})).unwrap();
        let lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let request: Value = serde_json::from_str(&line).unwrap();
            let command = request["execute"].as_str().unwrap();
            notes.0.lock().unwrap().push(command.to_owned());
            let mut message = match (command, command == "qmp_capabilities") {
                (_, true) => json!({"return": {}}),
                _ => match answer(command, &request["arguments"]) {
                    Answer::Return(value) => json!({"return": value}),
                    Answer::Refuse(desc) => json!({"error": {"class": "GenericError", "desc": desc}}),
                    Answer::Close => return,
                },
            };
            message["id"] = request["id"].clone();
            if writeln!(theirs, "{message}").is_err() {
                return;
            }
        }
    });
    let client = Client::from_socket(ours.into(), Duration::from_secs(20)).unwrap();
    (Vm::new(client, at), asked)
}

/// The answers of an idle QEMU whose guest runs.
fn usual(command: &str) -> Answer {
    let names = ["events", "return-path", "multifd", "mapped-ram"];
    Answer::Return(match command {
        "query-status" => json!({"status": "running"}),
        "query-migrate-capabilities" => {
            names.map(|name| json!({"capability": name, "state": false})).to_vec().into()
        }
        "query-migrate-parameters" => json!({"max-bandwidth": 77, "direct-io": false}),
        "qom-get" => json!("none-machine"),
        "human-monitor-command" => return Answer::Refuse("not compiled in"),
        "query-memory-size-summary" => json!({"base-memory": 4096}),
        "add-fd" => json!({"fdset-id": 1, "fd": 9}),
        _ => json!({}),
    })
}

/// A source with the usual answers, and the list of its commands.
fn source() -> (Vm, Asked) {
    qemu("SOURCE", |command, _| usual(command))
}

/// A destination whose `query-migrate` returns `status`.
fn destination(status: &'static str) -> (Vm, Asked) {
    qemu("DEST", move |command, _| match command {
        "query-migrate" => Answer::Return(json!({"status": status, "error-desc": "why"})),
        _ => usual(command),
    })
}

/// Begins a handover with the present settings of `from`.
fn begin(from: &mut Vm, to: Option<&mut Vm>, on_arrival: OnArrival, return_path: ReturnPath) -> Handover {
    let mut settings = Temporary::begin(from).unwrap();
    Handover::begin(from, &mut settings, to, on_arrival, return_path).unwrap()
}

fn begun(destination: (Vm, Asked)) -> (Handover, (Vm, Asked), (Vm, Asked)) {
    let (mut from, mut to) = (source(), destination);
    let handover = begin(&mut from.0, Some(&mut to.0), OnArrival::AsStarted, ReturnPath::On);
    assert!(handover.is_held());
    assert_eq!((to.1.count("stop"), from.1.count("migrate-set-capabilities")), (1, 1));
    (handover, from, to)
}

#[test]
fn return_path_that_stays_as_it_was_set_is_not_switched_on_and_the_destination_is_held_all_the_same() {
    let states = Arc::new(Mutex::new(Vec::new()));
    let seen = states.clone();
    let (mut from, _) = qemu("SOURCE", move |command, arguments| {
        if command == "migrate-set-capabilities" {
            seen.lock().unwrap().push(arguments["capabilities"].clone());
        }
        usual(command)
    });
    let mut to = destination("completed");

    let as_set = begin(&mut from, Some(&mut to.0), OnArrival::AsStarted, ReturnPath::AsSet);

    assert!(as_set.is_held());
    assert_eq!(to.1.count("stop"), 1);
    assert_eq!(*states.lock().unwrap(), [json!([{"capability": "events", "state": true}])]);
}

#[test]
fn lost_source_of_a_destination_that_still_loads_ends_nothing() {
    let (handover, from, mut to) = begun(destination("active"));

    let error = handover.lost(&from.0, Some(&mut to.0));

    assert!(matches!(error, DriveError::Undecided(_)), "{error}");
    for word in ["SOURCE", "DEST", "`active`", "`cont` there", "process has ended"] {
        assert!(error.to_string().contains(word), "{word} in {error}");
    }
    assert_eq!(to.1.count("quit"), 0);
}

#[test]
fn lost_source_of_a_destination_that_failed_ends_it() {
    let (handover, from, mut to) = begun(destination("failed"));

    let error = handover.lost(&from.0, Some(&mut to.0));

    assert!(matches!(error, DriveError::Failed(_)), "{error}");
    assert_eq!(to.1.count("quit"), 1);
}

#[test]
fn lost_source_of_a_destination_that_has_all_says_where_to_go_on() {
    let (handover, from, mut to) = begun(destination("completed"));

    let error = handover.lost(&from.0, Some(&mut to.0));

    assert!(
        matches!(error, DriveError::Undecided(_)) && error.to_string().contains("`cont` there"),
        "{error}"
    );
    assert_eq!(to.1.count("quit"), 0);
}

#[test]
fn completed_with_a_destination_that_cannot_be_asked_says_who_may_run() {
    let closes = |at| {
        qemu("DEST", move |command, _| match command {
            "query-migrate" if at == "query-migrate" => Answer::Close,
            "query-migrate" => Answer::Return(json!({"status": "completed"})),
            "cont" => Answer::Refuse("not now"),
            _ => usual(command),
        })
    };
    for at in ["query-migrate", "cont"] {
        let (handover, from, mut to) = begun(closes(at));

        let error = handover.completed(&from.0, Some(&mut to.0)).unwrap_err();

        assert!(matches!(error, DriveError::Undecided(_)), "{at}: {error}");
        for word in ["stopped at SOURCE", "held at DEST", "exactly one"] {
            assert!(error.to_string().contains(word), "{at}: {word} in {error}");
        }
    }
}

#[test]
fn completed_with_a_destination_that_failed_sends_the_operator_to_the_source() {
    let (handover, from, mut to) = begun(destination("failed"));

    let error = handover.completed(&from.0, Some(&mut to.0)).unwrap_err();

    assert!(matches!(error, DriveError::Failed(_)), "{error}");
    assert!(error.to_string().contains("why") && error.to_string().contains("at the source"), "{error}");
}

/// A destination whose process is this test's, so that its command line can be read. It has no `-S`.
fn destination_in_sight() -> (Vm, Asked) {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    qemu("DEST", move |command, _| match command {
        "query-migrate" => Answer::Return(json!({"status": "completed"})),
        "query-cpus-fast" => Answer::Return(json!([{"cpu-index": 0, "thread-id": thread}])),
        _ => usual(command),
    })
}

#[test]
fn completed_starts_the_guest_where_nobody_wants_it_paused() {
    for (to, is_in_sight) in [(destination_in_sight(), true), (destination("completed"), false)] {
        let (handover, from, mut to) = begun(to);
        let remark = handover.remark().map(str::to_owned);

        let arrived = handover.completed(&from.0, Some(&mut to.0)).unwrap();

        assert_eq!((arrived, to.1.count("cont")), (Arrived::Started, 1));
        let said = remark.is_some_and(|remark| remark.contains("-S") && remark.contains("--paused"));
        assert_eq!(said, !is_in_sight);
    }
}

#[test]
fn completed_leaves_a_guest_paused_that_the_operator_wants_paused() {
    let (mut from, mut to) = (source(), destination("completed"));
    let handover = begin(&mut from.0, Some(&mut to.0), OnArrival::Paused, ReturnPath::On);
    assert_eq!(handover.remark(), None);

    let arrived = handover.completed(&from.0, Some(&mut to.0)).unwrap();

    assert_eq!(arrived, Arrived::Paused(StaysPaused::Asked));
    assert_eq!((to.1.count("stop"), to.1.count("cont")), (1, 0));
}

#[test]
fn refused_migration_leaves_the_destination_waiting_as_it_was() {
    let (handover, _, mut to) = begun(destination("setup"));

    handover.refused(Some(&mut to.0));

    assert_eq!((to.1.count("quit"), to.1.count("cont")), (0, 1));
}

#[test]
fn failed_migration_ends_a_destination_that_it_reached_and_leaves_one_that_still_listens() {
    for (status, ended) in [("failed", true), ("setup", false)] {
        let (handover, _, mut to) = begun(destination(status));

        let reason = handover.failed(Some(&mut to.0));

        assert_eq!(reason.as_deref(), ended.then_some("the destination reports: why"), "{status}");
        assert_eq!((to.1.count("quit"), to.1.count("cont")), if ended { (1, 0) } else { (0, 1) }, "{status}");
    }
}

#[test]
fn sterna_that_refused_the_guest_gives_the_reason_and_is_not_ended() {
    let refuses = monitor("DEST", "Sterna 0.1.0", |command, _| match command {
        "query-migrate" => Answer::Return(json!({"status": "failed", "error-desc": "why"})),
        _ => usual(command),
    });
    let (handover, _, mut to) = begun(refuses);

    let reason = handover.failed(Some(&mut to.0));

    assert_eq!(reason.as_deref(), Some("the destination reports: why"));
    assert_eq!(to.1.count("quit"), 0);
}

#[test]
fn destination_that_has_ended_is_named_as_the_reason_of_a_failure() {
    let gone = qemu("DEST", |command, _| match command {
        "query-migrate" => Answer::Close,
        _ => usual(command),
    });
    let (handover, _, mut to) = begun(gone);

    let reason = handover.failed(Some(&mut to.0));

    assert_eq!(reason.as_deref(), Some("the destination at DEST has ended; its log contains the reason"));
}

/// A source that knows the capabilities `names`. Only those in `on` are on.
fn source_with(names: &'static [&'static str], on: &'static [&'static str]) -> (Vm, Asked) {
    qemu("SOURCE", move |command, _| match command {
        "query-migrate-capabilities" => Answer::Return(
            names.iter().map(|name| json!({"capability": name, "state": on.contains(name)})).collect(),
        ),
        _ => usual(command),
    })
}

#[test]
fn completed_proves_an_arrival_only_with_a_return_path_or_the_destinations_monitor() {
    let with: &[&str] = &["events", "return-path"];
    for (names, on, return_path, is_confirmed, word) in [
        (with, &[][..], ReturnPath::On, true, ""),
        (&["events"], &[], ReturnPath::On, false, "has no return path"),
        (with, &[], ReturnPath::AsSet, false, "return-path is off at SOURCE"),
        (with, &["return-path"], ReturnPath::AsSet, true, ""),
        (with, &["return-path"], ReturnPath::Impossible, false, "has no return path"),
    ] {
        let (mut from, _) = source_with(names, on);
        let handover = begin(&mut from, None, OnArrival::AsStarted, return_path);
        assert!(handover.unconfirmed().is_none_or(|why| !is_confirmed && why.contains(word)));

        let arrived = handover.completed(&from, None).unwrap();

        let wanted = if is_confirmed { Arrived::ByItself } else { Arrived::Unconfirmed };
        assert_eq!(arrived, wanted, "{names:?} {on:?} {return_path:?}");
    }
    // Without a return path, but with the destination's monitor, the destination is asked.
    let (mut from, _) = source_with(&["events"], &[]);
    let mut to = destination_in_sight();
    let handover = begin(&mut from, Some(&mut to.0), OnArrival::AsStarted, ReturnPath::On);
    assert_eq!(handover.completed(&from, Some(&mut to.0)).unwrap(), Arrived::Started);
}

#[test]
fn return_path_is_off_over_an_address_that_carries_nothing_back() {
    let (mut from, asked) = source_with(&["events", "return-path"], &["return-path"]);
    let mut settings = Temporary::begin(&mut from).unwrap();

    for address in ["exec:cat", "file:/a"] {
        assert_eq!(ReturnPath::over(address), ReturnPath::Impossible);
    }
    let over = ReturnPath::over("exec:cat");
    Handover::begin(&mut from, &mut settings, None, OnArrival::AsStarted, over).unwrap();

    assert_eq!(settings.capability("return-path"), Some(false));
    settings.put_back(&mut from).unwrap();
    assert_eq!(asked.count("migrate-set-capabilities"), 2);
}

#[test]
fn begin_with_a_destination_that_cannot_be_held_names_it_and_notes_what_was_set() {
    let mut from = source();
    let mut to = qemu("DEST", |command, _| match command {
        "stop" => Answer::Refuse("no"),
        _ => usual(command),
    });
    let mut settings = Temporary::begin(&mut from.0).unwrap();

    let error =
        Handover::begin(&mut from.0, &mut settings, Some(&mut to.0), OnArrival::AsStarted, ReturnPath::On)
            .expect_err("it would start by itself");

    assert!(error.to_string().contains("DEST"), "{error}");
    assert_eq!(settings.names(), "events, return-path");
}

/// A watcher that never has a wish.
struct Quiet;

impl Watch for Quiet {
    fn show(&mut self, _: &Progress) {}

    fn wish(&mut self) -> Wish {
        Wish::Continue
    }

    fn note(&mut self, _: &str) {}
}

/// Writes an image of a guest that ran, in libvirt's container.
fn image(path: &Path) {
    let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
    shape.configuration.machine_type = "none".into();
    shape.ram.footers = true;
    shape.ram.blocks.push(BlockShape {
        name: "m0".into(),
        length_bytes: 4096,
        address: None,
        host_page_bytes: None,
        is_skipped: false,
    });
    let envelope = Envelope::new(b"<domain/>\n".to_vec(), None).unwrap();
    let options = MappedOptions { envelope: Some(envelope), ..MappedOptions::default() };
    MappedWriter::create(path, &shape, options).unwrap().complete(&shape).unwrap();
}

fn request(path: &Path) -> RestoreRequest {
    RestoreRequest {
        path: path.to_owned(),
        access: Access::default(),
        channels: None,
        direct: Direct::Off,
        start: Start::Running,
    }
}

#[test]
fn restore_whose_load_is_refused_leaves_the_vm_waiting_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    image(&path);
    let mut vm = qemu("VM", |command, _| match command {
        "query-status" => Answer::Return(json!({"status": "inmigrate"})),
        "migrate-incoming" => Answer::Refuse("no such thing"),
        _ => usual(command),
    });

    let error = restore(&mut vm.0, &request(&path), &mut Quiet).expect_err("refused");

    assert!(matches!(error, DriveError::Unfit(_)) && error.to_string().contains("no such thing"), "{error}");
    assert_eq!((vm.1.count("quit"), vm.1.count("remove-fd")), (0, 1));
    assert_eq!(vm.1.count("migrate-set-capabilities"), 2, "settings are put back");
}

#[test]
fn restore_that_has_loaded_the_guest_ends_nothing_whatever_is_refused_then() {
    for refused in ["cont", "query-status", "migrate-set-capabilities"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        image(&path);
        let mut is_loaded = false;
        let mut vm = qemu("VM", move |command, _| match command {
            _ if is_loaded && command == refused => Answer::Refuse("not now"),
            "query-status" if is_loaded => Answer::Return(json!({"status": "paused"})),
            "query-status" => Answer::Return(json!({"status": "inmigrate"})),
            "query-migrate" if is_loaded => Answer::Return(json!({"status": "completed"})),
            "migrate-incoming" => {
                is_loaded = true;
                Answer::Return(json!({}))
            }
            _ => usual(command),
        });

        let restored = restore(&mut vm.0, &request(&path), &mut Quiet).expect("the guest is there");

        assert!(restored.warnings.iter().any(|text| text.contains("not now")), "{:?}", restored.warnings);
        assert_eq!(vm.1.count("quit"), 0, "{refused}");
    }
}

#[test]
fn save_that_failed_lets_the_guest_run_on_even_if_cont_is_refused_at_first() {
    let directory = tempfile::tempdir().unwrap();
    let mut refusals = 2;
    let (mut has_begun, mut is_stopped) = (false, false);
    let mut vm = qemu("VM", move |command, _| match command {
        "query-migrate" if has_begun => Answer::Return(json!({"status": "failed", "error-desc": "broke"})),
        "query-status" if is_stopped => Answer::Return(json!({"status": "paused"})),
        "stop" => {
            is_stopped = true;
            Answer::Return(json!({}))
        }
        "migrate" => {
            has_begun = true;
            Answer::Return(json!({}))
        }
        "cont" if refusals > 0 => {
            refusals -= 1;
            Answer::Refuse("the migration has not ended yet")
        }
        _ => usual(command),
    });
    let request = SaveRequest {
        path: directory.path().join("image"),
        format: sterna_image::Format::MappedRam,
        channels: None,
        direct: Direct::Off,
        domain: None,
        replace: false,
        frames: Default::default(),
        resume_after: false,
    };

    let error = save(&mut vm.0, &request, &mut Quiet).expect_err("it broke").to_string();

    assert!(error.contains("broke") && error.contains("continues to run"), "{error}");
    assert_eq!((vm.1.count("cont"), vm.1.count("migrate-set-capabilities")), (3, 2));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
