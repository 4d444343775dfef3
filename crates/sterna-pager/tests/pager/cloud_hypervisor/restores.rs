//! Images that become machines, with memory that is filled before it is handed over.

use std::thread;
use std::time::Duration;

use sterna_image::convert::{ConvertOptions, convert_directory, write_directory};
use sterna_pager::GuestStage;
use sterna_pager::cloud_hypervisor::{Command, Restore, RestorePlan, SavedMachine, SessionError};
use sterna_store::StoredImage;
use sterna_uffd_peer::cloud_hypervisor::{ERROR, OK, Receiver, Reply, command};

use super::{World, ended, failed, is_completed};

#[test]
fn machine_comes_back_byte_for_byte() {
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), false).unwrap();
    for stays_paused in [false, true] {
        let plan = RestorePlan { stays_paused, ..RestorePlan::new(world.socket()) };
        let restore = Restore::start(world.open(&world.image()), plan).unwrap();
        let arrived = vmm.accept().unwrap();

        let statistics = ended(&restore);
        assert!(is_completed(&statistics), "{statistics:#?}");
        assert_eq!(statistics.pid, Some(std::process::id() as i32));
        assert_eq!((statistics.missing_pages, statistics.faults), (0, 0));
        assert_eq!(statistics.content_pages + statistics.zero_pages, statistics.total_pages);
        let end = if stays_paused { command::COMPLETE_PAUSED } else { command::COMPLETE };
        assert_eq!(arrived.last, end);
        assert!(arrived.memory_of(&world.machine).unwrap() == world.machine.memory);
        assert_eq!((arrived.config, arrived.state), (world.machine.config(), world.machine.state()));
    }
}

/// A snapshot that the VMM wrote itself lacks the configuration of a migration.
#[test]
fn snapshot_directory_of_the_vmm_is_restored_by_its_image() {
    let world = World::new();
    world.saved();
    let (directory, image) = (world.path("directory"), world.path("converted.sterna"));
    write_directory(&world.image(), &directory, &ConvertOptions::default()).unwrap();
    std::fs::remove_file(directory.join("migration-config.json")).unwrap();
    convert_directory(&directory, &image, false, &ConvertOptions::default()).unwrap();
    let vmm = Receiver::bind(&world.socket(), false).unwrap();

    let restore = world.restore_of(&image, false);
    let arrived = vmm.accept().unwrap();

    assert!(is_completed(&ended(&restore)));
    assert!(arrived.memory_of(&world.machine).unwrap() == world.machine.memory);
    assert_eq!(arrived.state, world.machine.state());
    let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    let (sent, own) = (value(&arrived.config), value(&world.machine.config()));
    for member in ["vm_config", "common_cpuid"] {
        assert_eq!(sent[member], own[member]);
    }
    let mappings = |config: &serde_json::Value| config["memory_manager_data"]["guest_ram_mappings"].clone();
    assert_eq!(mappings(&sent), mappings(&own));
}

#[test]
fn vmm_that_starts_later_gets_the_machine() {
    let world = World::new();
    world.saved();
    let restore = world.restore(false);
    assert!(matches!(restore.statistics().stage, GuestStage::Active));
    let vmm = Receiver::bind(&world.socket(), false).unwrap();

    vmm.accept().unwrap();

    assert!(is_completed(&ended(&restore)));
    std::fs::remove_file(world.socket()).unwrap();
    let plan = RestorePlan { connect_limit: Duration::ZERO, ..RestorePlan::new(world.socket()) };
    let restore = Restore::start(world.open(&world.image()), plan).unwrap();
    failed(&restore, |error| matches!(error, SessionError::Connect { .. }));
}

#[test]
fn refusal_or_death_of_the_vmm_ends_the_restore_and_the_next_attempt_works() {
    let world = World::new();
    world.saved();
    let vmm = Receiver::bind(&world.socket(), false).unwrap();
    let stages = [
        (command::START, Command::Start),
        (command::MEMORY_FD, Command::MemoryFd),
        (command::CONFIG, Command::Config),
        (command::STATE, Command::State),
        (command::COMPLETE, Command::Complete),
    ];
    for (number, expected) in stages {
        let refuse =
            |wrong: Reply| move |came: u16, _: &_| if came == number { wrong } else { Reply::Status(OK) };
        let restore = world.restore(false);
        // The end of the connection may be noted while the next request is sent.
        let _ = vmm.receive(refuse(Reply::Status(ERROR)));
        failed(&restore, |error| matches!(error, SessionError::Refused { command } if *command == expected));

        let restore = world.restore(false);
        vmm.receive(refuse(Reply::Close)).unwrap();
        failed(&restore, |error| matches!(error, SessionError::Closed { .. }));

        let restore = world.restore(false);
        let _ = vmm.receive(refuse(Reply::Status(7)));
        failed(&restore, |error| matches!(error, SessionError::Message(_)));
    }
    let restore = world.restore(false);
    vmm.accept().unwrap();
    assert!(is_completed(&ended(&restore)));
}

#[test]
fn operator_ends_a_restore_that_waits() {
    let world = World::new();
    world.saved();
    let restore = world.restore(false);

    restore.stop();

    failed(&restore, |error| matches!(error, SessionError::Stopped));
    // While the VMM thinks about an answer.
    let vmm = Receiver::bind(&world.socket(), false).unwrap();
    let restore = world.restore(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            vmm.receive(|number, _| {
                if number == command::STATE {
                    restore.stop();
                    ended(&restore);
                }
                Reply::Status(OK)
            })
        });
        failed(&restore, |error| matches!(error, SessionError::Stopped));
    });
}

#[test]
fn image_of_another_vmm_or_machine_is_refused() {
    let world = World::new();
    let firecracker = world.path("firecracker");
    std::fs::create_dir(&firecracker).unwrap();
    std::fs::write(firecracker.join("mem"), vec![1; 8192]).unwrap();
    std::fs::write(firecracker.join("vmstate"), b"state").unwrap();
    let image = world.path("other.sterna");
    convert_directory(&firecracker, &image, false, &ConvertOptions::default()).unwrap();
    let refused = |image: &std::path::Path| {
        SavedMachine::new(&StoredImage::open(image, None).unwrap(), 4 << 20).err().unwrap()
    };
    assert!(matches!(refused(&image), SessionError::OtherKind { kind, .. } if kind == "firecracker"));
    // The memory is a page short.
    world.saved();
    let directory = world.path("directory");
    write_directory(&world.image(), &directory, &ConvertOptions::default()).unwrap();
    let memory = &world.machine.memory[..world.machine.memory.len() - 4096];
    std::fs::write(directory.join("memory-ranges"), memory).unwrap();
    let short = world.path("short.sterna");
    convert_directory(&directory, &short, false, &ConvertOptions::default()).unwrap();
    assert!(matches!(refused(&short), SessionError::Machine(_)));
    std::fs::remove_file(directory.join("state.json")).unwrap();
    let lacking = world.path("lacking.sterna");
    convert_directory(&directory, &lacking, false, &ConvertOptions::default()).unwrap();
    assert!(matches!(refused(&lacking), SessionError::LacksFile { file: "state.json", .. }));
}
