//! The order of frames in an index, and the packs that it names.

use crate::layout::{ExtentTable, FrameEntry};

/// Puts the frames into the order of their places, and leaves out those that no extent names any more.
pub(super) fn sort(frames: &mut Vec<FrameEntry>, extents: &mut [ExtentTable]) {
    let mut used = vec![false; frames.len()];
    let named = |table: &ExtentTable, used: &mut Vec<bool>| {
        for extent in 0..table.extents() {
            if let Some(used) = used.get_mut(table.get(extent).frame as usize) {
                *used = true;
            }
        }
    };
    extents.iter().for_each(|table| named(table, &mut used));
    let mut order: Vec<u32> = (0..frames.len() as u32).filter(|frame| used[*frame as usize]).collect();
    order.sort_by_key(|frame| {
        let entry = &frames[*frame as usize];
        (entry.pack, entry.offset)
    });
    let mut now = vec![u32::MAX; frames.len()];
    for (new, old) in (0..).zip(&order) {
        now[*old as usize] = new;
    }
    *frames = order.iter().map(|frame| frames[*frame as usize]).collect();
    for table in extents.iter_mut() {
        for extent in 0..table.extents() {
            let frame = table.get(extent).frame;
            if frame != u32::MAX {
                table.set_frame(extent, now[frame as usize]);
            }
        }
    }
}

/// The packs that frames name. The frames are numbered by them.
pub(super) fn used_packs(packs: &[[u8; 16]], frames: &mut [FrameEntry]) -> Vec<[u8; 16]> {
    let (mut used, mut last) = (Vec::new(), None);
    for frame in frames.iter_mut().filter(|_| !packs.is_empty()) {
        if last != Some(frame.pack) {
            last = Some(frame.pack);
            used.push(packs[frame.pack as usize]);
        }
        // The frames are in the order of their packs, so that the new order is the same.
        frame.pack = used.len() as u32 - 1;
    }
    used
}
