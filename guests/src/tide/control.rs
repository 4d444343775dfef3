//! The control page of a vCPU: 512 little-endian 64-bit words. The control page of vCPU i is the page
//! at [`super::LOAD_ADDRESS`]` + 4096 · (1 + i)`.
//!
//! Words that only the image sets are constants of the guest; the checker demands them. Words whose names
//! begin with `REQUEST` are the host's to write: first the wishes, then [`REQUEST_COUNT`], one more than
//! before.

use sterna_ram::PAGE_SIZE;

use super::{Tide, layout};
use crate::model::WORDS_PER_PAGE;

/// Constant: [`MAGIC_VALUE`].
pub const MAGIC: usize = 0;
/// Constant: the vCPU's index shifted left by 40, to be added to a page's number for its identity.
pub const IDENTITY: usize = 1;
/// Steps that are complete: the counter S of the model.
pub const STEPS: usize = 2;
/// Turns of the main loop: 8 steps at full speed, else one or none.
pub const BEATS: usize = 3;
/// The most ticks of the time-stamp counter between two beats.
pub const MAX_GAP: usize = 4;
/// The time-stamp counter at the last beat.
pub const LAST_BEAT: usize = 5;
/// Constant: seed of the patterns.
pub const SEED: usize = 6;
/// [`STEPS`] of the next vCPU (of the first, for the last), read before the step in flight began.
pub const WITNESS: usize = 7;
/// Constant: from this control page to the next vCPU's, in bytes, signed.
pub const NEIGHBOUR: usize = 8;
/// Constant: guest-physical address of page 0 of the share.
pub const FIRST_SEGMENT: usize = 9;
/// Constant: pages in the first segment.
pub const SPLIT: usize = 10;
/// Constant: to be added to 4096 · page for the address of pages from [`SPLIT`] on.
pub const SECOND_SEGMENT: usize = 11;
/// Constant: pages in the share.
pub const SHARE_PAGES: usize = 12;
/// Constant: ticks between two lines on the serial port.
pub const LINE_TICKS: usize = 13;
/// How often the time-stamp counter was behind an earlier reading.
pub const CLOCK_WENT_BACK: usize = 14;
/// Requests that were not taken over: unknown pattern, or no room for another epoch.
pub const REFUSED: usize = 15;
/// Requests so far.
pub const REQUEST_COUNT: usize = 16;
/// Wish: number of the pattern.
pub const REQUEST_PATTERN: usize = 17;
/// Wish: pages of the working set; 0 or more than the share: the share.
pub const REQUEST_WORKING_SET: usize = 18;
/// Wish: ticks from step to step.
pub const REQUEST_PACE: usize = 19;
/// [`REQUEST_COUNT`] as it was last taken over.
pub const ADOPTED: usize = 20;
/// Number of the pattern in force.
pub const PATTERN: usize = 21;
/// Pages of the working set in force.
pub const WORKING_SET: usize = 22;
/// Ticks from step to step.
pub const PACE: usize = 23;
/// Pages of the hot set: a tenth of the working set, at least 1.
pub const HOT_PAGES: usize = 24;
/// Epochs so far.
pub const EPOCHS: usize = 25;
/// Wish: not 0 to forget [`MAX_GAP`]; the guest writes 0.
pub const REQUEST_GAP_RESET: usize = 26;
/// Constant: 1 if this vCPU prints.
pub const PRINTS: usize = 27;
/// The line that is printed, 32 bytes.
pub const LINE: usize = 28;
/// The time-stamp counter when the last step that keeps a pace was due.
pub const LAST_STEP: usize = 32;
/// The time-stamp counter at the last line.
pub const LAST_LINE: usize = 33;
/// Epochs: first step, number of the pattern, pages of the working set, 0.
pub const FIRST_EPOCH: usize = 36;
/// Room for so many epochs.
pub const EPOCHS_MAX: usize = (WORDS_PER_PAGE - FIRST_EPOCH) / 4;

/// Ticks of the time-stamp counter that a guest which keeps a pace makes up for if it was late: some 20 ms.
pub const CATCH_UP_TICKS: i32 = 1 << 26;

/// The bytes `TIDECTL1`.
pub const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"TIDECTL1");

/// Words that nothing changes after the start.
pub(super) const CONSTANTS: [usize; 10] =
    [MAGIC, IDENTITY, SEED, NEIGHBOUR, FIRST_SEGMENT, SPLIT, SECOND_SEGMENT, SHARE_PAGES, LINE_TICKS, PRINTS];

/// The control page as the guest starts with it.
pub(super) fn page(tide: &Tide, worker: usize) -> [u64; WORDS_PER_PAGE] {
    let (config, share) = (&tide.config, &tide.shares[worker]);
    let pages = share.pages();
    let working_set = config.working_set_pages.unwrap_or(pages).min(pages);
    let address = |segment| layout::guest_address(&tide.ranges, segment);
    let first = share.segments()[0];
    let after_first = share.segments().get(1).map_or(0, address);
    let workers = tide.shares.len() as i64;
    let neighbour = ((worker as i64 + 1) % workers - worker as i64) * PAGE_SIZE as i64;
    let mut page = [0; WORDS_PER_PAGE];
    page[MAGIC] = MAGIC_VALUE;
    page[IDENTITY] = crate::model::PageId::new(worker, 0).0;
    page[SEED] = config.seed.wrapping_add(worker as u64 * 0x1_0000_0001);
    page[NEIGHBOUR] = neighbour as u64;
    page[FIRST_SEGMENT] = address(&first);
    page[SPLIT] = first.pages;
    page[SECOND_SEGMENT] = after_first.wrapping_sub(first.pages * PAGE_SIZE as u64);
    page[SHARE_PAGES] = pages;
    page[LINE_TICKS] = config.heartbeat_ticks.unwrap_or(0);
    page[PRINTS] = u64::from(worker == 0 && config.heartbeat_ticks.is_some());
    page[PATTERN] = config.pattern as u64;
    page[WORKING_SET] = working_set;
    page[PACE] = config.pace_ticks;
    page[HOT_PAGES] = (working_set / 10).max(1);
    page[REQUEST_PATTERN] = config.pattern as u64;
    page[REQUEST_WORKING_SET] = working_set;
    page[REQUEST_PACE] = config.pace_ticks;
    page[EPOCHS] = 1;
    page[FIRST_EPOCH] = 1;
    page[FIRST_EPOCH + 1] = config.pattern as u64;
    page[FIRST_EPOCH + 2] = working_set;
    page
}
