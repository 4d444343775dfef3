//! The same back ends continue with another machine of this host. Only their front end changes.

use super::*;
use sterna::{MigrationMode, TargetVm};

fn heir(kind: DeviceKind, queues: usize) -> Result<Arc<KvmMachine>, Failure> {
    let device = VhostUserOptions {
        queues: kind.queues(queues),
        kind: Some(kind),
        answer_limit: Duration::from_secs(20),
        ..VhostUserOptions::new("vhost-user/0", "/nobody/listens")
    };
    let config = MachineConfig {
        incoming: true,
        takes_over: true,
        vhost_user: vec![device],
        ..MachineConfig::new("transport")
    };
    KvmMachine::new(config).map_err(|error| error.to_string())
}

fn hand_over(source: &Arc<KvmMachine>, target: Arc<dyn TargetVm>) -> (Outcome, Arrival) {
    let directory = TempDir::new().expect("a directory");
    let address = Address::Unix(directory.path().join("m"));
    let parameters = Parameters { mode: MigrationMode::CprTransfer, ..Parameters::default() };
    let capabilities = Capabilities::default();
    let incoming = Incoming::listen(target, &address, parameters.clone(), capabilities, Arc::new(()));
    let incoming = incoming.expect("a place");
    let migration = Migration::start(source.clone(), &address, parameters, capabilities, Arc::new(()));
    (migration.expect("a start").wait(), incoming.wait())
}

#[test]
fn storage_daemon_goes_on_with_another_machine() -> Result<(), Failure> {
    let test = "storage_daemon_goes_on_with_another_machine";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    for queues in [1, 2] {
        let image = image();
        let daemon = BackEnd::storage_daemon(&root, image.path(), 2, 0)?;
        let mut machine = daemon.machine(DeviceKind::Block, queues, false)?;
        let mut driver = Driver::start(&machine, 2, 0, queues as u64);
        let last = queues - 1;
        assert_eq!(driver.read(&machine, last, 5), sector(5));
        let place = |request: u64| ANSWER + request * 0x1000;
        let length = |hop: u64| (SECTORS + hop * 100) * SECTOR as u64;
        for (hop, is_paused) in [(1, false), (2, true), (3, false)] {
            let written = sector(hop + 1000);
            driver.submit(&machine, last, 6, Some(&written), ANSWER);
            driver.wait(&machine, last);
            // These requests are in flight when the guest stops.
            for request in 0..10 {
                driver.submit(&machine, last, 100 + request, None, place(request));
            }
            driver.registers.notify(&machine, last as u32);
            if is_paused {
                machine.pause();
            }
            let target = heir(DeviceKind::Block, queues)?;

            let (outcome, arrival) = hand_over(&machine, target.clone());

            assert!(
                matches!(outcome, Outcome::Completed),
                "{}",
                daemon.explain(&format!("{outcome:?} {arrival:?}"))
            );
            machine.quit();
            machine = target;
            if is_paused {
                daemon.resize(length(hop))?;
                machine.cont().map_err(|error| error.to_string())?;
            }
            let begin = Instant::now();
            while driver.queues[last].in_flight() > 0 {
                assert!(begin.elapsed() < PATIENCE, "requests are lost");
                driver.queues[last].take(machine.ram());
            }
            for request in 0..10 {
                assert_eq!(Driver::answer(&machine, place(request)), sector(100 + request));
            }
            driver.registers.acknowledge(&machine, 1);
            assert_eq!(driver.read(&machine, last, 6), written);
            // The daemon reports the change to this machine and to no other.
            if !is_paused {
                daemon.resize(length(hop))?;
            }
            let sectors = length(hop) / SECTOR as u64;
            driver.registers.acknowledge(&machine, 2);
            crate::registers::wait_until("the new length", || {
                driver.registers.configuration(&machine, 8) == sectors.to_le_bytes()
            });
            assert_eq!(driver.read(&machine, 0, sectors - 1), [0; SECTOR]);
        }
        driver = Driver::begin_anew(&machine, 2, queues as u64);
        driver.submit(&machine, last, 6, Some(&sector(6)), ANSWER);
        driver.wait(&machine, last);
    }
    Ok(())
}

#[test]
fn virtiofsd_goes_on_with_another_machine_and_keeps_its_session() -> Result<(), Failure> {
    let test = "virtiofsd_goes_on_with_another_machine_and_keeps_its_session";
    let Some(root) = Root::qemu_for(test).filter(|_| kvm_for(test)) else { return Ok(()) };
    let shared = TempDir::new().map_err(|error| error.to_string())?;
    fs::write(shared.path().join("file"), "what stands in it").map_err(|error| error.to_string())?;
    for (options, tag) in [(&[][..], Some("share".to_owned())), (&["--tag", "share"][..], None)] {
        let daemon = BackEnd::virtiofsd(&root, shared.path(), options)?;
        let kind = DeviceKind::FileSystem { tag };
        let mut machine = daemon.machine(kind.clone(), 1, false)?;
        let mut driver = Driver::start(&machine, 26, 0, 2);
        let answer = driver.ask(&machine, fuse::INIT, 2, 0, &fuse::init(), 4096);
        assert_eq!(answer[..4], 7u32.to_le_bytes());
        let inode =
            fuse::word(&driver.ask(&machine, fuse::LOOKUP, 4, fuse::ROOT, &fuse::name("file"), 4096), 0);
        let handle = fuse::word(&driver.ask(&machine, fuse::OPEN, 6, inode, &fuse::open(), 4096), 0);
        for hop in 0..3 {
            let target = heir(kind.clone(), 1)?;

            let (outcome, arrival) = hand_over(&machine, target.clone());

            assert!(
                matches!(outcome, Outcome::Completed),
                "{}",
                daemon.explain(&format!("{outcome:?} {arrival:?}"))
            );
            machine.quit();
            machine = target;
            let place = fuse::place(handle, 0, 100);
            let found = driver.ask(&machine, fuse::READ, 8 + 2 * hop, inode, &place, 100);
            assert_eq!(String::from_utf8_lossy(&found), "what stands in it");
        }
        // The driver is unloaded and loaded again.
        driver = Driver::begin_anew(&machine, 26, 2);
        let answer = driver.ask(&machine, fuse::INIT, 2, 0, &fuse::init(), 4096);
        assert_eq!(answer[..4], 7u32.to_le_bytes());
    }
    Ok(())
}
