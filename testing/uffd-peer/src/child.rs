//! The process itself: it reads commands from standard input, and answers each with a line.

use std::fmt::Display;
use std::io::{self, BufRead, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::memory::{self, Mapping};
use crate::{PAGE, mix};

/// Begins every line of an answer.
pub(crate) const ANSWER: &str = "peer: ";

#[derive(Default)]
struct Child {
    mappings: Vec<Mapping>,
    page: u64,
    descriptor: Option<OwnedFd>,
    stream: Option<UnixStream>,
}

/// Obeys the commands on standard input until it ends.
#[allow(clippy::print_stdout, reason = "the answers of the process")]
pub fn child() {
    let mut child = Child::default();
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match child.obey(&words) {
            Ok(answer) => answer,
            Err(why) => format!("failed {why}"),
        };
        println!("{ANSWER}{answer}");
        let _ = io::stdout().flush();
    }
}

fn failed(error: impl Display) -> String {
    error.to_string()
}

fn number(word: Option<&&str>) -> Result<u64, String> {
    word.ok_or("a number is missing")?.parse().map_err(failed)
}

impl Child {
    fn obey(&mut self, words: &[&str]) -> Result<String, String> {
        let at = |index: usize| number(words.get(index));
        match words[0] {
            // map PAGE IS_HUGE BYTES…
            "map" => {
                self.page = at(1)?;
                let is_huge = words.get(2) == Some(&"huge");
                for index in 3..words.len() {
                    self.mappings.push(Mapping::new(at(index)?, is_huge).map_err(failed)?);
                }
                self.descriptor = Some(memory::register(&self.mappings).map_err(failed)?);
                Ok("done".to_owned())
            }
            "connect" => {
                self.stream = Some(UnixStream::connect(words[1]).map_err(failed)?);
                Ok("done".to_owned())
            }
            "send" => self.send(words[1]).map(|()| "done".to_owned()),
            "read" => Ok(self.word(at(1)?).to_string()),
            "write" => {
                let (mapping, offset) = self.locate(at(1)?);
                mapping.write(offset, at(2)?);
                Ok("done".to_owned())
            }
            "sum" => Ok(self.sum(at(1)?, at(2)?).to_string()),
            "remove" => {
                let (mapping, offset) = self.locate(at(1)?);
                mapping.remove(offset, at(2)?).map_err(failed)?;
                Ok("done".to_owned())
            }
            "race" => self.race(at(1)?, at(2)?),
            "latencies" => Ok(self.latencies(at(1)?, at(2)?, at(3)?)),
            // Connects, sends, and touches the first page: the nanoseconds of all.
            "first" => {
                let began = Instant::now();
                self.stream = Some(UnixStream::connect(words[1]).map_err(failed)?);
                self.send("whole")?;
                std::hint::black_box(self.word(0));
                Ok(began.elapsed().as_nanos().to_string())
            }
            "work" => Ok(self.work(at(1)?, at(2)?).to_string()),
            other => Err(format!("no command {other}")),
        }
    }

    /// Sends the message in one of several right and wrong ways.
    fn send(&self, how: &str) -> Result<(), String> {
        let descriptor = self.descriptor.as_ref().ok_or("nothing is mapped")?.as_fd();
        let message = self.message(if how == "larger" { self.page } else { 0 });
        let other = std::fs::File::open("/dev/null").map_err(failed)?;
        match how {
            "whole" | "larger" => self.transmit(message.as_bytes(), &[descriptor]),
            // Byte by byte, the descriptor with the last one.
            "slow" => {
                let (last, first) = message.as_bytes().split_last().ok_or("no message")?;
                for byte in first {
                    self.transmit(&[*byte], &[])?;
                }
                self.transmit(&[*last], &[descriptor])
            }
            "alone" => self.transmit(message.as_bytes(), &[]),
            "twice" => self.transmit(message.as_bytes(), &[descriptor, descriptor]),
            "null" => self.transmit(message.as_bytes(), &[other.as_fd()]),
            "garbage" => self.transmit(b"\x16\x03\x01 no json", &[descriptor]),
            "half" => self.transmit(&message.as_bytes()[..20], &[descriptor]),
            other => Err(format!("no way {other}")),
        }
    }

    fn message(&self, more: u64) -> String {
        let (mut offset, page) = (0, self.page);
        let regions = self.mappings.iter().map(|mapping| {
            let region = format!(
                r#"{{"base_host_virt_addr":{},"size":{},"offset":{offset},"page_size":{page},"page_size_kib":{page}}}"#,
                mapping.address,
                mapping.bytes + more
            );
            offset += mapping.bytes + more;
            region
        });
        format!("[{}]", regions.collect::<Vec<_>>().join(","))
    }

    fn transmit(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), String> {
        let stream = self.stream.as_ref().ok_or("not connected")?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        sent.map(drop).map_err(failed)
    }

    /// The mapping of an offset in the guest's memory, and the offset inside.
    fn locate(&self, offset: u64) -> (Mapping, u64) {
        let mut start = 0;
        for mapping in &self.mappings {
            if offset < start + mapping.bytes {
                return (*mapping, offset - start);
            }
            start += mapping.bytes;
        }
        panic!("{offset} is in no mapping");
    }

    fn word(&self, offset: u64) -> u64 {
        let (mapping, offset) = self.locate(offset);
        mapping.read(offset)
    }

    fn sum(&self, from: u64, bytes: u64) -> u64 {
        (from..from + bytes).step_by(8).fold(0, |sum, offset| mix(sum, self.word(offset)))
    }

    /// Removes pages of the first `bytes` bytes while another thread touches them, `rounds` times. Answers with the number of
    /// pages that were not zero after their removal.
    fn race(&self, bytes: u64, rounds: u64) -> Result<String, String> {
        let (is_over, wrong) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut offset = 0;
                while !is_over.load(Ordering::Acquire) {
                    std::hint::black_box(self.word(offset));
                    offset = (offset + PAGE * 7) % bytes;
                }
            });
            for round in 0..rounds {
                let offset = (round * 13 * PAGE) % bytes;
                let (mapping, inside) = self.locate(offset);
                if let Err(error) = mapping.remove(inside, PAGE) {
                    is_over.store(true, Ordering::Release);
                    return Err(failed(error));
                }
                let is_zero = (0..PAGE).step_by(8).all(|at| mapping.read(inside + at) == 0);
                wrong.fetch_add(u64::from(!is_zero), Ordering::Relaxed);
            }
            is_over.store(true, Ordering::Release);
            Ok(wrong.load(Ordering::Relaxed).to_string())
        })
    }

    /// Touches `count` random pages, with `pause` microseconds between two. Answers with the nanoseconds of each touch.
    fn latencies(&self, count: u64, pause: u64, seed: u64) -> String {
        let pages = self.mappings.iter().map(|mapping| mapping.bytes).sum::<u64>() / PAGE;
        let mut random = fastrand::Rng::with_seed(seed);
        let mut times = Vec::new();
        for _ in 0..count {
            let offset = random.u64(0..pages) * PAGE;
            let began = Instant::now();
            std::hint::black_box(self.word(offset));
            times.push((began.elapsed().as_nanos() as u64).to_string());
            let until = Instant::now() + Duration::from_micros(pause);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        times.join(" ")
    }

    /// Reads and writes the first `bytes` bytes again and again for `milliseconds`. Answers with the number of pages.
    fn work(&self, bytes: u64, milliseconds: u64) -> u64 {
        let until = Instant::now() + Duration::from_millis(milliseconds);
        let mut pages = 0;
        while Instant::now() < until {
            for offset in (0..bytes).step_by(PAGE as usize) {
                let (mapping, inside) = self.locate(offset);
                for at in (0..PAGE).step_by(64) {
                    mapping.write(inside + at, mapping.read(inside + at).wrapping_add(1));
                }
                pages += 1;
                if pages % 256 == 0 && Instant::now() >= until {
                    break;
                }
            }
        }
        pages
    }
}
