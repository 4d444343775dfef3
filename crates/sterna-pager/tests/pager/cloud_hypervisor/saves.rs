//! Machines that become images.

use std::fs;
use std::os::fd::AsFd;

use sterna_image::convert::{ConvertOptions, convert_directory, write_directory};
use sterna_pager::cloud_hypervisor::{
    Command, MachineError, MessageError, OrderError, SaveStage, SessionError, vm_config,
};
use sterna_store::StoredImage;
use sterna_uffd_peer::cloud_hypervisor::{ERROR, Machine, OK, Sender, command};

use super::{World, result};

#[test]
fn machine_becomes_the_image_of_its_snapshot_directory() {
    let world = World::new();

    let saved = world.saved();

    assert_eq!((saved.memory_bytes, saved.slots), (world.machine.memory.len() as u64, 2));
    assert!(saved.is_acknowledged && !saved.was_paused);
    assert_eq!(saved.pid, Some(std::process::id() as i32));
    assert!(!world.socket().exists(), "the socket is removed");
    let (back, own, own_image) = (world.path("back"), world.path("own"), world.path("own.sterna"));
    write_directory(&world.image(), &back, &ConvertOptions::default()).unwrap();
    assert!(fs::read(back.join("memory-ranges")).unwrap() == world.machine.memory);
    assert_eq!(fs::read(back.join("state.json")).unwrap(), world.machine.state());
    let config = world.machine.config();
    assert_eq!(fs::read(back.join("config.json")).unwrap(), vm_config(&config).unwrap());
    assert_eq!(fs::read(back.join("migration-config.json")).unwrap(), config);
    // The same files, as the VMM's own snapshot has them.
    fs::create_dir(&own).unwrap();
    for file in ["memory-ranges", "config.json", "state.json"] {
        fs::copy(back.join(file), own.join(file)).unwrap();
    }
    convert_directory(&own, &own_image, false, &ConvertOptions::default()).unwrap();
    let (image, own) =
        (StoredImage::open(&world.image(), None).unwrap(), StoredImage::open(&own_image, None).unwrap());
    assert_eq!((image.kind(), image.blocks()), (own.kind(), own.blocks()));
    let names = |image: &StoredImage| -> Vec<(String, u64)> {
        image.files().iter().map(|file| (file.name.clone(), file.length_bytes)).collect()
    };
    let mut files = names(&image);
    files.retain(|(name, _)| name != "migration-config.json");
    assert_eq!(files, names(&own));
}

#[test]
fn paused_guest_is_saved_to_a_store_whose_frames_are_shared() {
    let world = World::new();
    let store = world.path("store");
    let mut sizes = Vec::new();
    for name in ["a", "b"] {
        let place = format!("store:{}#{name}", store.display());
        let save = world.save_to(place.as_ref());
        let vmm = Sender::connect(&world.socket()).unwrap();
        vmm.begin(&world.machine).unwrap();
        assert_eq!(vmm.request(command::COMPLETE_PAUSED, &[], &[]).unwrap(), Some(OK));
        let saved = result(&save).unwrap();
        assert!(saved.was_paused);
        sizes.push(saved.image_bytes);
    }

    assert!(sizes[1] < sizes[0] / 2, "{sizes:?}");
}

/// Runs a VMM against a save; the save fails as `is_right` says, and leaves nothing.
fn refused(vmm: impl FnOnce(&Sender, &Machine), is_right: impl FnOnce(&SessionError) -> bool) {
    let world = World::new();
    let save = world.save();
    let sender = Sender::connect(&world.socket()).unwrap();
    vmm(&sender, &world.machine);
    let error = result(&save).unwrap_err();

    assert!(is_right(&error), "{error:?}");
    drop(save);
    assert_eq!(world.others(&[]), Vec::<String>::new());
}

#[test]
fn descriptors_that_are_wrong_are_answered_with_an_error() {
    for count in [0, 2] {
        refused(
            |vmm, machine| {
                let files = machine.memfds().unwrap();
                let descriptors: Vec<_> = files.iter().take(count).map(AsFd::as_fd).collect();
                assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
                let slot = 3u32.to_le_bytes();
                assert_eq!(vmm.request(command::MEMORY_FD, &slot, &descriptors).unwrap(), Some(ERROR));
                assert_eq!(vmm.answer().unwrap(), None);
            },
            |error| {
                let needed = OrderError::Descriptors { command: Command::MemoryFd, count, needed: 1 };
                matches!(error, SessionError::Order(found) if *found == needed)
            },
        );
    }
    let pipe = rustix::pipe::pipe().unwrap().0;
    refused(
        |vmm, _| {
            assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
            let slot = 3u32.to_le_bytes();
            assert_eq!(vmm.request(command::MEMORY_FD, &slot, &[pipe.as_fd()]).unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::NotMemory { slot: 3, .. }),
    );
}

#[test]
fn memory_that_does_not_fit_the_configuration_is_answered_with_an_error() {
    // The second file is a page too short.
    refused(
        |vmm, machine| {
            assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
            for (slot, file) in machine.slots.iter().zip(machine.memfds().unwrap()) {
                file.set_len(slot.file_offset + slot.bytes - u64::from(slot.number == 1)).unwrap();
                let number = slot.number.to_le_bytes();
                assert_eq!(vmm.request(command::MEMORY_FD, &number, &[file.as_fd()]).unwrap(), Some(OK));
            }
            assert_eq!(vmm.request(command::CONFIG, &machine.config(), &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::STATE, &machine.state(), &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::NotMemory { slot: 1, .. }),
    );
    // A slot has no memory.
    refused(
        |vmm, machine| {
            assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::CONFIG, &machine.config(), &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::STATE, &machine.state(), &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::NoMemory { slot: 3 }),
    );
    // The configuration is no text of a machine.
    refused(
        |vmm, machine| {
            assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::CONFIG, b"{}", &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::STATE, &machine.state(), &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::Machine(MachineError::Lacks { .. })),
    );
}

#[test]
fn garbage_and_messages_in_the_wrong_place_are_answered_with_an_error() {
    refused(
        |vmm, _| {
            vmm.send(b"GET / HTTP/1.1\r\n\r\n", &[]).unwrap();
            assert_eq!(vmm.answer().unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::Message(MessageError::Command { .. })),
    );
    refused(
        |vmm, _| assert_eq!(vmm.request(command::STATE, b"{}", &[]).unwrap(), Some(ERROR)),
        |error| matches!(error, SessionError::Order(OrderError::Unexpected { .. })),
    );
    refused(
        |vmm, _| {
            assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
            vmm.header(command::CONFIG, u64::MAX).unwrap();
            assert_eq!(vmm.answer().unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::Message(MessageError::Length { .. })),
    );
    refused(
        |vmm, machine| {
            vmm.begin(machine).unwrap();
            vmm.header(command::MEMORY, 16).unwrap();
            assert_eq!(vmm.answer().unwrap(), Some(ERROR));
        },
        |error| matches!(error, SessionError::Order(OrderError::NotLocal)),
    );
    refused(
        |vmm, _| {
            assert_eq!(vmm.request(command::START, &[], &[]).unwrap(), Some(OK));
            assert_eq!(vmm.request(command::ABANDON, &[], &[]).unwrap(), Some(OK));
        },
        |error| matches!(error, SessionError::Abandoned),
    );
}

#[test]
fn end_before_complete_leaves_no_image_and_the_next_attempt_has_one() {
    let world = World::new();
    std::fs::write(world.image(), b"the image of before").unwrap();
    for bytes in [0, 7] {
        let mut save = world.save();
        // A connection without a word is no VMM.
        drop(Sender::connect(&world.socket()).unwrap());
        let vmm = Sender::connect(&world.socket()).unwrap();
        vmm.begin(&world.machine).unwrap();
        assert_eq!(save.progress().stage, SaveStage::Receiving);
        vmm.send(&vec![5; bytes], &[]).unwrap();
        drop(vmm);

        let error = result(&save).unwrap_err();
        assert!(matches!(error, SessionError::Closed { .. }), "{error:?}");
        assert_eq!(std::fs::read(world.image()).unwrap(), b"the image of before");
        save = world.save_to(&world.path("again"));
        let vmm = Sender::connect(&world.socket()).unwrap();
        vmm.begin(&world.machine).unwrap();
        assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(OK));
        result(&save).unwrap();
        std::fs::remove_file(world.path("again")).unwrap();
    }
}

#[test]
fn operator_who_ends_a_save_lets_the_guest_continue() {
    let world = World::new();
    let save = world.save();
    let vmm = Sender::connect(&world.socket()).unwrap();
    vmm.begin(&world.machine).unwrap();

    save.stop();
    assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(ERROR));

    assert!(matches!(result(&save), Err(SessionError::Stopped)));
    assert!(!world.image().exists());
    // Before a VMM has connected.
    let save = world.save();
    save.stop();
    assert!(matches!(result(&save), Err(SessionError::Stopped)));
    assert!(Sender::connect(&world.socket()).is_err());
}

#[test]
fn image_that_cannot_be_written_lets_the_guest_continue() {
    let world = World::new();
    std::fs::write(world.image(), b"mine").unwrap();
    for place in [world.image(), world.path("missing/vm.sterna")] {
        let save = world.save_to(&place);
        let vmm = Sender::connect(&world.socket()).unwrap();
        vmm.begin(&world.machine).unwrap();

        assert_eq!(vmm.request(command::COMPLETE, &[], &[]).unwrap(), Some(ERROR));

        assert!(matches!(result(&save), Err(SessionError::Image(_))));
    }
    assert_eq!(std::fs::read(world.image()).unwrap(), b"mine");
}

#[test]
fn socket_of_another_process_is_not_taken() {
    let world = World::new();
    let save = world.save();
    let plan = sterna_pager::cloud_hypervisor::SavePlan {
        socket: world.socket(),
        image: world.image(),
        options: ConvertOptions::default(),
    };

    let refused = sterna_pager::cloud_hypervisor::Save::start(plan).err();

    assert!(matches!(refused, Some(SessionError::Listen { .. })), "{refused:?}");
    drop(save);
    assert!(!world.socket().exists());
}
