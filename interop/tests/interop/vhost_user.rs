//! A real virtiofsd, driven with the vhost-user protocol and hand-made FUSE requests. A file system's session
//! moves from one process to another, and open files stay open.

pub mod fuse;
mod machine;

use std::fs;
use std::sync::Arc;

use fuse::ROOT;
use machine::Machine;
use sterna::{Address, Arrival, Capabilities, DeviceStream, Incoming, Migration, Outcome, Parameters};
use sterna_devices::vhost_user::VhostUserLog;
use sterna_interop::{Failure, Root, kvm_for};
use sterna_ram::dirty::{DirtyBitmaps, DirtySource, VhostLog};
use sterna_vmm::KvmMachine;
use tempfile::TempDir;

const FILES: usize = 300;

fn shared(files: usize) -> TempDir {
    let directory = TempDir::new().expect("a directory");
    for file in 0..files {
        let folder = directory.path().join(format!("folder{}", file % 7));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(format!("file{file}")), text(file)).expect("a file");
    }
    directory
}

fn text(file: usize) -> String {
    format!("what stands in file {file}\n").repeat(1 + file % 5)
}

/// Opens every file, and returns its inode and handle.
fn open_all(machine: &mut Machine) -> Vec<(u64, u64)> {
    let open = |file: usize| {
        let folder = machine.lookup(ROOT, &format!("folder{}", file % 7));
        let inode = machine.lookup(folder, &format!("file{file}"));
        (inode, machine.open(inode))
    };
    (0..FILES).map(open).collect()
}

fn read_all(machine: &mut Machine, handles: &[(u64, u64)]) {
    for (file, (inode, handle)) in handles.iter().enumerate() {
        let found = machine.read(*inode, *handle, 0, 4096);
        assert_eq!(String::from_utf8_lossy(&found), text(file), "file {file}");
    }
}

#[test]
fn session_in_another_virtiofsd_keeps_its_inodes_and_open_files() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("session_in_another_virtiofsd_keeps_its_inodes_and_open_files") else {
        return Ok(());
    };
    // Prepare the files, the source and its open handles.
    let files = shared(FILES);
    let mut source = Machine::start(&root, files.path(), &[])?;
    let mut target = Machine::start(&root, files.path(), &[])?;
    let log = Arc::new(VhostLog::new(&source.ram, vec![machine::whole()]).map_err(|e| e.to_string())?);
    let log = VhostUserLog::new(log, vec![Arc::clone(&source.device)]);
    source.begin_session();
    let handles = open_all(&mut source);
    read_all(&mut source, &handles);

    // Save and load the state in the same order as the engine.
    source.device.begin_save().map_err(|error| error.to_string())?;
    log.start().map_err(|error| error.to_string())?;
    read_all(&mut source, &handles);
    source.device.stop().map_err(|error| error.to_string())?;
    let mut dirty = DirtyBitmaps::new(&source.ram);
    log.sync(&mut dirty).map_err(|error| error.to_string())?;
    let state = source.read_state()?;
    let configuration = source.device.configuration().map_err(|error| error.to_string())?;
    source.device.end_save().map_err(|error| error.to_string())?;
    target.load(&state, &configuration)?;
    target.take_guest(&source);
    target.device.run().map_err(|error| error.to_string())?;

    // Check the size of the state and the logged pages.
    assert!(state.len() > FILES, "{} bytes are no state of {FILES} files", state.len());
    for page in machine::answer_pages() {
        assert!(dirty.block(0).get(page), "page {page} was written and not logged");
    }
    read_all(&mut target, &handles);
    let (inode, handle) = handles[5];
    assert_eq!(target.write(inode, handle, 0, b"WHAT"), 4);
    assert_eq!(target.read(inode, handle, 0, 4), b"WHAT");
    let again = target.lookup(ROOT, "folder5");
    assert_eq!(target.lookup(again, "file5"), inode, "an inode has another number now");
    Ok(())
}

#[test]
fn session_of_a_machine_moves_with_it_by_the_engine() -> Result<(), Failure> {
    let test = "session_of_a_machine_moves_with_it_by_the_engine";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    for channels in [0, 4] {
        let files = shared(FILES);
        let mut source = Machine::hosted(&root, files.path(), false)?;
        let mut target = Machine::hosted(&root, files.path(), true)?;
        let hosts = [&source, &target].map(|machine| machine.host.clone().expect("it is hosted"));
        hosts[0].resume().map_err(|error| error.to_string())?;
        source.begin_session();
        let handles = open_all(&mut source);
        read_all(&mut source, &handles);

        let (outcome, arrival) = migrate(&hosts, channels);

        assert!(matches!(outcome, Outcome::Completed), "{channels} channels: {outcome:?}, {arrival:?}");
        target.take_driver(&source);
        read_all(&mut target, &handles);
        let (inode, handle) = handles[7];
        assert_eq!(target.write(inode, handle, 0, b"WHAT"), 4);
        assert_eq!(target.read(inode, handle, 0, 4), b"WHAT");
    }
    Ok(())
}

fn migrate([source, target]: &[Arc<KvmMachine>; 2], channels: u8) -> (Outcome, Arrival) {
    let parameters = Parameters { multifd_channels: channels.max(1), ..Parameters::default() };
    let capabilities = Capabilities { multifd: channels > 0, ..Capabilities::default() };
    let address: Address = "tcp:127.0.0.1:0".parse().expect("an address");
    let incoming = Incoming::listen(target.clone(), &address, parameters.clone(), capabilities, Arc::new(()))
        .expect("a place");
    let migration =
        Migration::start(source.clone(), &incoming.address(), parameters, capabilities, Arc::new(()));
    (migration.expect("a start").wait(), incoming.wait())
}

#[test]
fn save_undone_leaves_the_session_as_it_was() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("save_undone_leaves_the_session_as_it_was") else { return Ok(()) };
    let files = shared(FILES);
    let mut source = Machine::start(&root, files.path(), &[])?;
    let log = Arc::new(VhostLog::new(&source.ram, vec![machine::whole()]).map_err(|e| e.to_string())?);
    let log = VhostUserLog::new(log, vec![Arc::clone(&source.device)]);
    source.begin_session();
    let handles = open_all(&mut source);

    for _ in 0..3 {
        source.device.begin_save().map_err(|error| error.to_string())?;
        log.start().map_err(|error| error.to_string())?;
        source.device.stop().map_err(|error| error.to_string())?;
        assert!(source.device.read(&mut [0; 100]).map_err(|error| error.to_string())? > 0);
        source.device.end_save().map_err(|error| error.to_string())?;
        source.device.run().map_err(|error| error.to_string())?;
        log.stop().map_err(|error| error.to_string())?;
        read_all(&mut source, &handles);
    }
    Ok(())
}

#[test]
fn session_with_files_that_the_other_side_lacks_is_refused_and_runs_on() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("session_with_files_that_the_other_side_lacks_is_refused_and_runs_on")
    else {
        return Ok(());
    };
    let (files, none) = (shared(FILES), TempDir::new().expect("a directory"));
    let mut source = Machine::start(&root, files.path(), &[])?;
    let target = Machine::start(&root, none.path(), &["--migration-on-error", "abort"])?;
    source.begin_session();
    let handles = open_all(&mut source);

    source.device.begin_save().map_err(|error| error.to_string())?;
    source.device.stop().map_err(|error| error.to_string())?;
    let state = source.read_state()?;
    let configuration = source.device.configuration().map_err(|error| error.to_string())?;
    let refused = target.load(&state, &configuration).expect_err("its files are not there");
    target.device.end_load().map_err(|error| error.to_string())?;
    source.device.end_save().map_err(|error| error.to_string())?;
    source.device.run().map_err(|error| error.to_string())?;

    assert!(refused.contains("virtiofs") && refused.contains("loading"), "{refused}");
    read_all(&mut source, &handles);
    Ok(())
}

#[test]
fn state_that_was_cut_short_is_refused() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("state_that_was_cut_short_is_refused") else { return Ok(()) };
    let files = shared(FILES);
    let mut source = Machine::start(&root, files.path(), &[])?;
    source.begin_session();
    open_all(&mut source);
    source.device.begin_save().map_err(|error| error.to_string())?;
    source.device.stop().map_err(|error| error.to_string())?;
    let state = source.read_state()?;
    let configuration = source.device.configuration().map_err(|error| error.to_string())?;

    let target = Machine::start(&root, files.path(), &[])?;
    let refused = target.load(&state[..state.len() / 2], &configuration).expect_err("half a state");

    assert!(refused.contains("virtiofs") && refused.contains("loading"), "{refused}");
    Ok(())
}
