//! A guest is saved to a file and restored from it: completely, or not at all.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use crate::support::{cause, has_warning};
use sterna::SystemRefusal;
use sterna::{
    Address, Arrival, Capabilities, Direct, Incoming, Migration, MigrationError, Outcome, Parameters,
    RunState, SettingsError, SourceVm, StartError, Status, TargetVm, Vm,
};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_testing::SmallDisk;
use sterna_transport::TransportError;

/// A directory on a disk (the build's), where direct I/O is usually supported.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A guest whose memory is full of data, with some zero pages.
fn dense() -> ProcessConfig {
    let blocks = vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 4 << 20)];
    ProcessConfig { blocks, fill: Fill::Half(7), ..config() }
}

fn file(path: &Path, offset: u64) -> Address {
    Address::File { path: path.to_owned(), offset }
}

/// Each way to write or read a file, with a name.
fn ways() -> Vec<(&'static str, Parameters, Capabilities)> {
    let legacy = Capabilities::default();
    let mapped = Capabilities { mapped_ram: true, ..legacy };
    let many = Capabilities { multifd: true, ..mapped };
    let lanes = |count, direct_io| Parameters { multifd_channels: count, direct_io, ..parameters() };
    vec![
        ("legacy", lanes(1, Direct::Off), legacy),
        ("legacy, direct", lanes(1, Direct::Wanted), legacy),
        ("mapped", lanes(1, Direct::Off), mapped),
        ("mapped, direct", lanes(1, Direct::Wanted), mapped),
        ("mapped, multifd", lanes(3, Direct::Off), many),
        ("mapped, multifd, direct", lanes(4, Direct::Wanted), many),
    ]
}

fn save(
    source: &Arc<ProcessGuest>,
    to: &Address,
    params: &Parameters,
    capabilities: Capabilities,
) -> Migration {
    let migration = start(source, to, params, capabilities, Arc::new(()));
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Completed), "{to}: {outcome:?}");
    migration
}

fn try_load(
    target: &Arc<ProcessGuest>,
    from: &Address,
    params: &Parameters,
    capabilities: Capabilities,
) -> Result<(Incoming, Arrival), StartError> {
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let incoming = Incoming::listen(vm, from, params.clone(), capabilities, Arc::new(()))?;
    let arrival = incoming.wait();
    Ok((incoming, arrival))
}

fn load(
    from: &Address,
    params: &Parameters,
    capabilities: Capabilities,
    config: &ProcessConfig,
) -> (Arc<ProcessGuest>, Arrival) {
    let target = ProcessGuest::waiting(config.clone()).expect("destination");
    let (_, arrival) = try_load(&target, from, params, capabilities).expect("loading");
    (target, arrival)
}

fn running(config: &ProcessConfig) -> Arc<ProcessGuest> {
    trace();
    let source = ProcessGuest::boot(config.clone()).expect("source");
    source.cont().expect("the guest starts");
    source
}

fn names(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn writing_guest_is_saved_and_loaded_every_way() {
    let directory = on_disk();
    for (way, params, capabilities) in ways() {
        for offset in [0, 0x1_2345] {
            let path = directory.path().join(format!("{way} {offset}"));
            let at = file(&path, offset);
            let source = running(&dense());
            let migration = save(&source, &at, &params, capabilities);
            assert_eq!(migration.status(), Status::Completed);
            assert!(!migration.may_guest_run(), "{way}");
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

            for (other, params, capabilities) in ways() {
                if capabilities.mapped_ram != way.starts_with("mapped") {
                    continue;
                }
                let (target, arrival) = load(&at, &params, capabilities, &dense());
                assert!(
                    matches!(arrival, Arrival::Completed(RunState::Running)),
                    "{way}, {other}: {arrival:?}"
                );
                assert_lives_on(&target);
            }
        }
    }
    assert_eq!(names(directory.path()).len(), 12, "nothing is left aside");
}

#[test]
fn guest_that_is_saved_through_a_pipe_is_whole_and_may_run_on() {
    let directory = on_disk();
    let (_, params, capabilities) = ways().remove(0);
    let source = running(&dense());
    for number in 0..2 {
        let path = directory.path().join(format!("{number}"));
        let (mut theirs, ours) = std::io::pipe().unwrap();
        let to = Address::Handed(sterna::HandedFd::new(ours.into(), "pipe"));
        assert!(to.is_pipe());
        let mut stored = std::fs::File::create(&path).unwrap();
        let storing = std::thread::spawn(move || std::io::copy(&mut theirs, &mut stored).unwrap());

        let migration = save(&source, &to, &params, capabilities);

        // The end of the pipe is the end of the stream.
        assert!(storing.join().unwrap() > 1 << 20);
        let (target, arrival) = load(&file(&path, 0), &params, capabilities, &dense());
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        assert_lives_on(&target);
        migration.resume_saved().unwrap();
        assert_eq!(source.run_state(), RunState::Running);
    }
}

#[test]
fn pipe_whose_reader_ends_or_hangs_leaves_the_guest_here() {
    let (_, params, capabilities) = ways().remove(0);
    let source = running(&dense());
    let (theirs, ours) = std::io::pipe().unwrap();
    let to = Address::Handed(sterna::HandedFd::new(ours.into(), "pipe"));
    let migration = start(&source, &to, &params, capabilities, Arc::new(()));
    drop(theirs);
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    assert_eq!(source.run_state(), RunState::Running);

    let (theirs, ours) = std::io::pipe().unwrap();
    let to = Address::Handed(sterna::HandedFd::new(ours.into(), "pipe"));
    let migration = start(&source, &to, &params, capabilities, Arc::new(()));
    migration.cancel().unwrap();
    let outcome = migration.wait();
    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
    assert_eq!(source.run_state(), RunState::Running);
    drop(theirs);

    let mapped = Capabilities { mapped_ram: true, ..capabilities };
    let (_theirs, ours) = std::io::pipe().unwrap();
    let to = Address::Handed(sterna::HandedFd::new(ours.into(), "pipe"));
    let vm: Arc<dyn SourceVm> = source.clone();
    let refused = Migration::start(vm, &to, params, mapped, Arc::new(()));
    assert!(matches!(refused, Err(StartError::Settings(SettingsError::MappedNeedsFile))));
}

#[test]
fn saved_guest_runs_on_if_it_is_told_to() {
    let directory = on_disk();
    let path = directory.path().join("image");
    let (_, params, capabilities) = ways().remove(3);
    let source = running(&config());
    for _ in 0..2 {
        let params = Parameters { replace_file: true, ..params.clone() };
        let migration = save(&source, &file(&path, 0), &params, capabilities);
        assert!(migration.is_saved());
        assert_eq!(source.run_state(), RunState::Paused);

        migration.resume_saved().unwrap();

        assert!(migration.may_guest_run() && !migration.is_saved());
        assert!(migration.resume_saved().is_err(), "once");
        assert_eq!(migration.while_guest_is_free(|| 7), Some(7));
        assert_lives_on(&source);
    }
    let (target, _) = load(&file(&path, 0), &params, capabilities, &config());
    assert_lives_on(&target);
}

#[test]
fn paused_guest_is_loaded_paused_and_so_is_one_that_must_not_start() {
    let directory = on_disk();
    let path = directory.path().join("image");
    let (_, params, capabilities) = ways().remove(2);
    let source = running(&config());
    save(&source, &file(&path, 0), &params, capabilities);
    let (target, arrival) =
        load(&file(&path, 0), &params, Capabilities { unmanaged: false, ..capabilities }, &config());
    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    target.cont().unwrap();
    assert_lives_on(&target);
    target.pause().unwrap();

    let again = directory.path().join("again");
    let saved = save(&target, &file(&again, 0), &params, capabilities);
    let (target, arrival) = load(&file(&again, 0), &params, capabilities, &config());

    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    assert!(saved.is_saved());
    target.cont().unwrap();
    assert_lives_on(&target);
}

#[test]
fn file_that_is_there_is_refused_and_replaced_only_if_told_so() {
    let directory = on_disk();
    let path = directory.path().join("image");
    std::fs::write(&path, "somebody's").unwrap();
    let (_, params, capabilities) = ways().remove(3);
    let source = running(&config());
    let migration = start(&source, &file(&path, 0), &params, capabilities, Arc::new(()));
    let Outcome::Failed { error, held: false } = migration.wait() else { panic!("it must fail") };
    assert!(matches!(cause(&error), Some(TransportError::FileExists { .. })), "{error}");
    assert_eq!(error.fault(), Some(sterna::Fault::Local));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
    assert_lives_on(&source);

    save(&source, &file(&path, 0), &Parameters { replace_file: true, ..params.clone() }, capabilities);
    let (target, _) = load(&file(&path, 0), &params, capabilities, &config());
    assert_lives_on(&target);
}

#[test]
fn file_keeps_its_beginning_where_an_offset_is_named() {
    let directory = on_disk();
    let path = directory.path().join("container");
    std::fs::write(&path, vec![b'h'; 70_000]).unwrap();
    let (_, params, capabilities) = ways().remove(5);
    let source = running(&config());
    save(&source, &file(&path, 65_000), &params, capabilities);

    let saved = std::fs::read(&path).unwrap();
    assert!(saved[..65_000].iter().all(|byte| *byte == b'h'));
    assert_eq!(&saved[65_000..65_004], b"QEVM");
    let (target, _) = load(&file(&path, 65_000), &params, capabilities, &config());
    assert_lives_on(&target);
}

#[test]
fn place_taken_in_the_last_moment_fails_and_the_guest_runs_on() {
    let directory = on_disk();
    let path = directory.path().join("image");
    for (way, params, capabilities) in ways() {
        let source = running(&config());
        let capabilities = Capabilities { pause_before_switchover: true, ..capabilities };
        let migration = start(&source, &file(&path, 0), &params, capabilities, Arc::new(()));
        while migration.status() != Status::PreSwitchover {
            assert!(migration.outcome().is_none(), "{way}: {:?}", migration.outcome());
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::write(&path, "another's").unwrap();
        migration.continue_switchover().unwrap();

        let Outcome::Failed { error, held: false } = migration.wait() else { panic!("it must fail") };

        assert!(matches!(cause(&error), Some(TransportError::FileExists { .. })), "{way}: {error}");
        assert_lives_on(&source);
        assert_eq!(names(directory.path()), std::slice::from_ref(&path));
        assert_eq!(std::fs::read(&path).unwrap(), b"another's");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn cancelled_save_leaves_no_file_and_the_guest_runs_on() {
    let directory = on_disk();
    let path = directory.path().join("image");
    for (way, params, capabilities) in ways() {
        let source = running(&config());
        // So slow that it cannot end by itself.
        let params = Parameters { max_bandwidth_bytes: 1 << 20, ..params };
        let migration = start(&source, &file(&path, 0), &params, capabilities, Arc::new(()));
        while migration.statistics().transferred_bytes == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        migration.cancel().unwrap();
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Cancelled), "{way}: {outcome:?}");
        assert_lives_on(&source);
        assert_eq!(names(directory.path()).len(), 0, "{way}");
    }
}

#[test]
fn full_disk_fails_with_its_reason_and_the_guest_runs_on() {
    // File sizes that end within the first bytes, the pages, and the bytes after them (half of the pages are zero).
    let ram = Vm::ram(running(&dense()).as_ref()).total_bytes();
    for size in [4096, 1 << 20, ram / 2 - 8192, ram / 2] {
        let Some(small) = SmallDisk::mount_for("full_disk_fails_with_its_reason_and_the_guest_runs_on", size)
        else {
            return;
        };
        let path = small.path().join("image");
        for (way, params, capabilities) in ways() {
            let source = running(&dense());
            let migration = start(&source, &file(&path, 0), &params, capabilities, Arc::new(()));
            match migration.wait() {
                Outcome::Failed { error, held: false } => {
                    let Some(TransportError::DiskFull { file, .. }) = cause(&error) else {
                        panic!("{way}, {size}: {error:?}")
                    };
                    assert!(Path::new(file).starts_with(small.path()), "{way}, {size}: {error}");
                    assert_lives_on(&source);
                    assert_eq!(names(small.path()).len(), 0, "{way}, {size}");
                }
                // Pages that the guest has not written yet may still be zero.
                Outcome::Completed if size >= ram / 2 - 8192 => std::fs::remove_file(&path).unwrap(),
                outcome => panic!("{way}, {size}: {outcome:?}"),
            }
        }
    }
}

#[test]
fn file_cut_anywhere_is_refused_and_the_whole_one_loads_after_it() {
    let directory = on_disk();
    let path = directory.path().join("image");
    let seed = sterna_testing::seed("save");
    for (way, params, capabilities) in ways().into_iter().filter(|way| way.0.contains("direct")) {
        let source = running(&dense());
        save(&source, &file(&path, 0), &Parameters { replace_file: true, ..params.clone() }, capabilities);
        let whole = std::fs::read(&path).unwrap();
        let cut = directory.path().join("cut");
        let target = ProcessGuest::waiting(dense()).unwrap();
        // The description after EOF is not needed. It begins with 06 and its length.
        let text = whole.iter().rposition(|byte| *byte == b'{').map(|_| description_bytes(&whole)).unwrap();
        let eof = whole.len() - text - 5;
        let mut lengths = vec![0, 4, 8, 20, 60, 100, 4096, 1 << 20, eof - 1, eof - 2, eof - 100, eof - 4096];
        let mut random = fastrand::Rng::with_seed(seed);
        lengths.retain(|length| *length < eof);
        lengths.extend((0..20).map(|_| random.usize(..eof)));
        for length in lengths {
            std::fs::write(&cut, &whole[..length]).unwrap();
            let (_, arrival) = try_load(&target, &file(&cut, 0), &params, capabilities).unwrap();
            let Arrival::Failed(error) = arrival else {
                panic!("{way}, {length} bytes (STERNA_SEED={seed})")
            };
            let is_end = matches!(error, MigrationError::Ended(_))
                || matches!(cause(&error), Some(TransportError::FileEnd { .. }));
            assert!(is_end, "{way}, {length} bytes: {error:?}");
        }
        let (_, arrival) = try_load(&target, &file(&path, 0), &params, capabilities).unwrap();
        assert!(matches!(arrival, Arrival::Completed(_)), "{way}: {arrival:?}");
        assert_lives_on(&target);
    }
}

#[test]
fn file_with_any_byte_of_its_structure_changed_never_crashes_the_loader() {
    let directory = on_disk();
    let path = directory.path().join("image");
    let (_, params, capabilities) = ways().remove(3);
    let source = running(&dense());
    save(&source, &file(&path, 0), &params, capabilities);
    let image = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let length = image.metadata().unwrap().len();
    let mut target = ProcessGuest::waiting(dense()).unwrap();
    let seed = sterna_testing::seed("save");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..60 {
        // In the head, which contains offsets and lengths, and in the tail.
        let place = random.u64(..600);
        let place = if random.bool() { place } else { length - 1 - place };
        let mut byte = [0];
        image.read_exact_at(&mut byte, place).unwrap();
        image.write_all_at(&[byte[0] ^ 1 << random.u8(..8)], place).unwrap();
        // Loading may succeed (a bit of a device's counter, or of the description); it must end.
        let (_, arrival) = try_load(&target, &file(&path, 0), &params, capabilities)
            .unwrap_or_else(|error| panic!("STERNA_SEED={seed}: byte {place}: {error}"));
        image.write_all_at(&byte, place).unwrap();
        if matches!(arrival, Arrival::Completed(_)) {
            target = ProcessGuest::waiting(dense()).unwrap();
        }
    }
    let (target, _) = load(&file(&path, 0), &params, capabilities, &dense());
    assert_lives_on(&target);
}

#[test]
fn other_machine_and_other_form_are_refused_before_ram_is_touched() {
    let directory = on_disk();
    let (mapped, legacy) = (directory.path().join("mapped"), directory.path().join("legacy"));
    let ways = ways();
    let source = running(&config());
    save(&source, &file(&mapped, 0), &ways[3].1, ways[3].2).resume_saved().unwrap();
    save(&source, &file(&legacy, 0), &ways[1].1, ways[1].2);
    let larger = ProcessConfig {
        blocks: vec![("ram.low".into(), 64 << 20), ("ram.high".into(), 16 << 20)],
        ..config()
    };
    for (path, way, config) in
        [(&mapped, 0, config()), (&legacy, 2, config()), (&mapped, 3, larger.clone()), (&legacy, 1, larger)]
    {
        let target = ProcessGuest::waiting(config).unwrap();
        let (_, arrival) = try_load(&target, &file(path, 0), &ways[way].1, ways[way].2).unwrap();
        let Arrival::Failed(error) = arrival else { panic!("it must fail") };
        assert_eq!(error.fault(), Some(sterna::Fault::PeerIncompatible), "{error}");
        let resident: u64 = target.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
        assert_eq!(resident, 0, "{error}");
    }
}

#[test]
fn settings_that_do_not_fit_a_file_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = file(&directory.path().join("image"), 0);
    let source = running(&config());
    let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
    let mapped = Capabilities { mapped_ram: true, ..Capabilities::default() };
    let compressed = Parameters { multifd_compression: sterna::Compression::Zstd, ..parameters() };
    for (to, params, capabilities, why) in [
        (
            &at,
            parameters(),
            Capabilities { multifd: true, ..Capabilities::default() },
            SettingsError::FileIsOneChannel,
        ),
        (&at, compressed, Capabilities { multifd: true, ..mapped }, SettingsError::MappedIsUncompressed),
        (
            &at,
            parameters(),
            Capabilities { switchover_ack: true, ..mapped },
            SettingsError::FileDoesNotAnswer,
        ),
        (&"tcp:127.0.0.1:1".parse().unwrap(), parameters(), mapped, SettingsError::MappedNeedsFile),
    ] {
        let refused = Migration::start(Arc::clone(&vm), to, params.clone(), capabilities, Arc::new(()));
        let Err(StartError::Settings(refused)) = refused.map(|_| ()) else { panic!("{why}") };
        assert_eq!(refused, why);
        if why != SettingsError::FileDoesNotAnswer {
            let target: Arc<dyn TargetVm> = ProcessGuest::waiting(config()).unwrap();
            let refused = Incoming::listen(target, to, params, capabilities, Arc::new(()));
            assert!(matches!(refused, Err(StartError::Settings(refused)) if refused == why), "{why}");
        }
    }
    let target = ProcessGuest::waiting(config()).unwrap();
    let missing = try_load(&target, &at, &parameters(), mapped);
    let refusal = of_file(missing.map(|_| ()));
    let TransportError::System { channel, source, .. } = &*refusal else { panic!("{refusal}") };
    assert!(at.to_string().ends_with(channel.as_str()), "{refusal}");
    assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
}

/// The error because of which a file could not be opened.
fn of_file(refused: Result<(), StartError>) -> Arc<TransportError> {
    match refused {
        Err(StartError::System(SystemRefusal::Transport(why))) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn missing_direct_io_is_told_and_done_without_or_refused() {
    // A file system without direct I/O is not available everywhere. /proc is one, but files cannot be created there,
    // so only reading is tested.
    let target = ProcessGuest::waiting(config()).unwrap();
    let at = file(Path::new("/proc/self/status"), 0);
    let mapped = Capabilities { mapped_ram: true, ..Capabilities::default() };
    let required = Parameters { direct_io: Direct::Required, ..parameters() };
    let refused = try_load(&target, &at, &required, mapped);
    let refusal = of_file(refused.map(|_| ()));
    assert!(matches!(&*refusal, TransportError::NoDirect { .. }), "{refusal}");

    let log = Arc::new(Log::default());
    let wanted = Parameters { direct_io: Direct::Wanted, ..parameters() };
    let vm: Arc<dyn TargetVm> = target;
    let incoming = Incoming::listen(vm, &at, wanted, mapped, log.clone()).unwrap();
    assert!(matches!(incoming.wait(), Arrival::Failed(_)));
    assert!(has_warning(&log.events(), &["page cache"]));
}

/// Bytes of the description at the end: `06`, a length, and the text.
fn description_bytes(file: &[u8]) -> usize {
    (5..file.len())
        .find(|&length| {
            let at = file.len() - length;
            let length_field = file
                .get(at.wrapping_sub(4)..at)
                .map(|bytes| bytes.iter().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte)));
            length_field == Some(length) && file.get(at.wrapping_sub(5)) == Some(&6) && file[at] == b'{'
        })
        .expect("a description")
}
