//! Images with a damaged frame: no wrong byte reaches a guest, and the error says which page, image and frame.

use std::os::unix::fs::FileExt;

use sterna_pager::SourceError;
use sterna_pager::cloud_hypervisor::{Restore, SessionError};
use sterna_store::{PagePlace, StoreError, StoredImage};
use sterna_uffd_peer::cloud_hypervisor::{ERROR, OK, Receiver, Reply, command};

use super::{World, failed};

/// A page of the damaged frame.
const PAGE: u64 = 0x151;

/// Damages the frame of [`PAGE`], and returns its number.
fn damage(world: &World) -> u32 {
    let image = StoredImage::open(&world.image(), None).unwrap();
    let PagePlace::Frame { frame, .. } = image.place(0, PAGE) else { panic!("the page has content") };
    let (offset, bytes) = image.stored_at(frame);
    let file = std::fs::File::options().read(true).write(true).open(world.image()).unwrap();
    let at = offset + u64::from(bytes) / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
    frame
}

fn is_of(error: &SourceError, frame: u32) -> bool {
    matches!(error, SourceError::Store(StoreError::Frame { frame: found, .. }) if *found == frame)
}

#[test]
fn eager_restore_abandons_before_the_vmm_has_any_memory() {
    let world = World::new();
    world.saved();
    let frame = damage(&world);
    let vmm = Receiver::bind(&world.socket(), false).unwrap();

    let restore = world.restore(false);
    let arrived = vmm.accept().unwrap();

    assert_eq!(arrived.last, command::ABANDON);
    assert!(arrived.memory.is_empty());
    let text = failed(&restore, |error| matches!(error, SessionError::Source(why) if is_of(why, frame)));
    assert!(text.contains("vm.sterna") && text.contains(&format!("frame {frame}")), "{text}");
}

/// Starts a lazy restore. `None` if this host makes huge pages of memfds.
fn lazy(world: &World) -> Option<Restore> {
    let plan = sterna_pager::cloud_hypervisor::RestorePlan {
        is_lazy: true,
        ..sterna_pager::cloud_hypervisor::RestorePlan::new(world.socket())
    };
    match Restore::start(world.open(&world.image()), plan) {
        Err(SessionError::HugeShmem { .. }) => None,
        started => Some(started.unwrap()),
    }
}

#[test]
fn lazy_restore_answers_the_request_with_an_error_that_names_page_image_and_frame() {
    let world = World::new();
    world.saved();
    let frame = damage(&world);
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    let Some(restore) = lazy(&world) else { return };
    let arrived = vmm.accept().unwrap();
    assert_eq!(arrived.request(0x3000, 4096).unwrap(), Some(OK));

    assert_eq!(arrived.walk(&world.machine).unwrap(), Some(ERROR));

    let text =
        failed(&restore, |error| matches!(error, SessionError::Page { source, .. } if is_of(source, frame)));
    assert!(text.contains("0x150000") && text.contains("vm.sterna"), "{text}");
    assert!(text.contains(&format!("frame {frame}")), "{text}");
    let memory = arrived.memory_of(&world.machine).unwrap();
    assert!(memory[0x15_0000..0x16_0000].iter().all(|byte| *byte == 0), "nothing of the frame is there");
    assert!(memory[..0x15_0000] == world.machine.memory[..0x15_0000]);
}

/// The VMM touches the page while it loads its state: both connections end.
#[test]
fn damage_during_the_state_ends_both_connections() {
    let world = World::new();
    world.saved();
    let frame = damage(&world);
    let vmm = Receiver::bind(&world.socket(), true).unwrap();
    let Some(restore) = lazy(&world) else { return };

    let received = vmm.receive(|number, arrived| {
        if number == command::STATE {
            assert_eq!(arrived.request(PAGE * 4096, 4096).unwrap(), Some(ERROR));
            failed(
                &restore,
                |error| matches!(error, SessionError::Page { source, .. } if is_of(source, frame)),
            );
        }
        Reply::Status(OK)
    });

    assert!(received.is_err() || received.unwrap().last == command::STATE);
}
