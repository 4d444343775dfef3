//! A QEMU's disks, written at the standby, too: each gets one more child, an NBD client, whose connection goes through the relay.
//!
//! The disk must be a `quorum`, since that is the only node of QEMU's that takes a child while it is used. Its content goes to the standby
//! first, by a mirror job, while the guest runs and writes. When both are equal the guest is stopped for a moment: the job ends, and the
//! standby's side becomes a child.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::monitor::Monitor;
use super::relay::Relay;
use super::request::{DiskCopy, ProtectedDisk};
use crate::drive::error::DriveError;
use crate::drive::vm::{ANSWER_LIMIT, Vm};

/// What nodes and jobs are called.
const PREFIX: &str = "sterna-disk";
/// Between two looks at the jobs.
const LOOK: Duration = Duration::from_millis(50);
/// How long a job may take to end when both sides are equal.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Disks that have a child at the standby.
pub(super) struct Disks {
    disks: Vec<Attached>,
}

struct Attached {
    /// The quorum.
    parent: String,
    /// The NBD client, and the job that fills it.
    node: String,
}

/// A disk that does not go to the standby, and which the guest writes.
pub(super) struct OtherDisk {
    /// Its name.
    pub(super) name: String,
    /// What the operator should know of it, as a sentence.
    pub(super) remark: String,
}

/// Whether these disks can be written at the standby, too. Gives the others.
///
/// # Errors
/// Why not, in one sentence.
pub(super) fn check(vm: &mut Vm, disks: &[ProtectedDisk]) -> Result<Vec<OtherDisk>, DriveError> {
    let nodes = vm.execute("query-named-block-nodes", json!({"flat": true}))?;
    for ProtectedDisk { node, .. } in disks {
        let found = nodes.as_array().into_iter().flatten().find(|found| found["node-name"] == node.as_str());
        match found.map(|found| found["drv"].as_str().unwrap_or_default()) {
            Some("quorum") => {}
            Some(driver) => {
                return Err(DriveError::Unfit(format!(
                    "the block node {node} is a `{driver}`, and QEMU adds a child to a quorum alone: start it with `-blockdev \
                     quorum,node-name=NAME,vote-threshold=1,read-pattern=fifo,children.0={node}`, the device on NAME, and give --disk NAME"
                )));
            }
            None => return Err(DriveError::Unfit(format!("{} has no block node {node}", vm.at()))),
        }
    }
    let devices = vm.execute("query-block", Value::Null)?;
    let others = devices.as_array().into_iter().flatten().filter_map(|device| {
        let inserted = device.get("inserted").filter(|inserted| inserted["ro"] == false)?;
        let node = inserted["node-name"].as_str().unwrap_or_default();
        let name = [&device["qdev"], &device["device"]].into_iter().filter_map(Value::as_str);
        let name = name.into_iter().find(|name| !name.is_empty()).unwrap_or(node);
        let remark = format!(
            "the disk {name} (block node {node}) does not go to the standby: both hosts must share it, or name its quorum with --disk"
        );
        (!disks.iter().any(|disk| disk.node == node)).then(|| OtherDisk { name: name.to_owned(), remark })
    });
    Ok(others.collect())
}

impl Disks {
    /// Copies each of `disks` to the standby, and has QEMU write it there from then on. `goes_on` hears how far the copying is.
    ///
    /// # Errors
    /// QEMU refuses, the copying fails, or `goes_on` does. What was put there is taken away again.
    pub(super) fn attach(
        monitor: &Monitor,
        relay: &Relay,
        directory: &Path,
        disks: &[ProtectedDisk],
        goes_on: &dyn Fn(DiskCopy) -> Result<(), DriveError>,
    ) -> Result<Self, DriveError> {
        let this = Self {
            disks: disks
                .iter()
                .enumerate()
                .map(|(index, disk)| Attached { parent: disk.node.clone(), node: format!("{PREFIX}{index}") })
                .collect(),
        };
        if disks.is_empty() {
            return Ok(this);
        }
        let attached = this.begin_copies(monitor, relay, directory, disks).and_then(|()| {
            this.wait_for_copies(monitor, goes_on)?;
            this.become_children(monitor)
        });
        if let Err(error) = attached {
            // A connection that is silent would hold QEMU up.
            relay.close();
            // The first error is what the operator must hear.
            let _ = this.remove(monitor);
            return Err(error);
        }
        Ok(this)
    }

    fn begin_copies(
        &self,
        monitor: &Monitor,
        relay: &Relay,
        directory: &Path,
        disks: &[ProtectedDisk],
    ) -> Result<(), DriveError> {
        for (attached, disk) in self.disks.iter().zip(disks) {
            let path = directory.join(&attached.node);
            relay.listen_for_disk(&path).map_err(|error| DriveError::file("listen at", &path, error))?;
            let server = json!({"type": "unix", "path": path.display().to_string()});
            let node =
                json!({"driver": "nbd", "node-name": attached.node, "server": server, "export": disk.export});
            let named = |error: DriveError| {
                DriveError::Failed(format!(
                    "the disk {} does not get to the standby: {error}",
                    attached.parent
                ))
            };
            monitor.execute("blockdev-add", node, ANSWER_LIMIT).map_err(|error| {
                // QEMU does not hand on what the standby says about it.
                DriveError::Failed(format!(
                    "the disk {} does not get to the standby: {error}. There it must be called {} (`sterna standby --disk {}=FILE`)",
                    attached.parent, disk.export, disk.export
                ))
            })?;
            let job = json!({
                "job-id": attached.node, "device": attached.parent, "target": attached.node, "sync": "full",
                // Then both stay equal, however fast the guest writes.
                "copy-mode": "write-blocking",
                "on-source-error": "report", "on-target-error": "report", "auto-dismiss": false,
            });
            monitor.execute("blockdev-mirror", job, ANSWER_LIMIT).map_err(named)?;
        }
        Ok(())
    }

    fn wait_for_copies(
        &self,
        monitor: &Monitor,
        goes_on: &dyn Fn(DiskCopy) -> Result<(), DriveError>,
    ) -> Result<(), DriveError> {
        loop {
            let (mut copy, mut are_equal) = (DiskCopy::default(), true);
            for (name, job) in self.jobs(monitor)? {
                check_job(&name, &job)?;
                are_equal &= job["status"] == "ready";
                copy.copied_bytes += job["current-progress"].as_u64().unwrap_or(0);
                copy.total_bytes += job["total-progress"].as_u64().unwrap_or(0);
            }
            goes_on(copy)?;
            if are_equal {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Both sides of every disk are equal, and stay so.
    fn become_children(&self, monitor: &Monitor) -> Result<(), DriveError> {
        // What is written between the job's end and the child's beginning would be missing.
        monitor.execute("stop", Value::Null, ANSWER_LIMIT)?;
        let done = self.disks.iter().try_for_each(|disk| {
            monitor.execute("block-job-cancel", json!({"device": disk.node}), ANSWER_LIMIT)?;
            self.wait_for_end(monitor, disk)?;
            monitor.execute("job-dismiss", json!({"id": disk.node}), ANSWER_LIMIT)?;
            let child = json!({"parent": disk.parent, "node": disk.node});
            monitor.execute("x-blockdev-change", child, ANSWER_LIMIT).map(drop)
        });
        let resumed = monitor.execute("cont", Value::Null, ANSWER_LIMIT).map(drop);
        monitor.forget_pauses();
        done.and(resumed)
    }

    fn wait_for_end(&self, monitor: &Monitor, disk: &Attached) -> Result<(), DriveError> {
        let until = Instant::now() + END_LIMIT;
        loop {
            let job = self.jobs(monitor)?.into_iter().find(|(name, _)| *name == disk.parent);
            match job {
                Some((name, job)) if job["status"] == "concluded" && job.get("error").is_some() => {
                    return check_job(&name, &job);
                }
                Some((_, job)) if job["status"] == "concluded" => return Ok(()),
                Some(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                _ => {
                    let what = format!("copying the disk {} to the standby does not end", disk.parent);
                    return Err(DriveError::Failed(what));
                }
            }
        }
    }

    /// The jobs that fill the standby's side, each with the name of its disk.
    fn jobs(&self, monitor: &Monitor) -> Result<Vec<(String, Value)>, DriveError> {
        let jobs = monitor.execute("query-jobs", Value::Null, ANSWER_LIMIT)?;
        let find = |disk: &Attached| {
            let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == disk.node.as_str());
            let job = job.cloned().unwrap_or_else(|| json!({"status": "concluded", "error": "it is gone"}));
            (disk.parent.clone(), job)
        };
        Ok(self.disks.iter().map(find).collect())
    }

    /// Whether QEMU still writes each of them at the standby, too: an operator can take a child out of its quorum, and nobody is told.
    ///
    /// # Errors
    /// It does not, or the monitor's.
    pub(super) fn check(&self, monitor: &Monitor) -> Result<(), DriveError> {
        if self.disks.is_empty() {
            return Ok(());
        }
        let nodes = monitor.execute("query-named-block-nodes", json!({"flat": true}), ANSWER_LIMIT)?;
        self.disks.iter().try_for_each(|disk| {
            if !disk.has_child_in(&nodes) {
                return Err(disk.is_without_child());
            }
            match disk.overlay_in(&nodes) {
                Some(overlay) => Err(disk.is_below(overlay)),
                None => Ok(()),
            }
        })
    }

    /// Takes the standby's side away. The guest may run or stand.
    ///
    /// # Errors
    /// QEMU refuses.
    pub(super) fn remove(&self, monitor: &Monitor) -> Result<(), DriveError> {
        self.disks.iter().map(|disk| monitor.with(|vm| remove(vm, &disk.node))).fold(Ok(()), Result::and)
    }
}

impl Attached {
    /// Whether its disk has the standby's side. One that was taken out and put in again since it was looked at last has its old name,
    /// and is not noticed.
    fn has_child_in(&self, nodes: &Value) -> bool {
        let mut nodes = nodes.as_array().into_iter().flatten();
        let parent = nodes.find(|node| node["node-name"] == self.parent.as_str());
        let children = parent.and_then(|parent| parent["children"].as_array());
        children.into_iter().flatten().any(|child| child["node-name"] == self.node.as_str())
    }

    /// The node that takes the guest's writes in the place of its disk, if one was put over it.
    fn overlay_in<'a>(&self, nodes: &'a Value) -> Option<&'a str> {
        let is_over = |node: &&Value| {
            let children = node["children"].as_array();
            let has_below = children
                .into_iter()
                .flatten()
                .any(|child| child["child"] == "backing" && child["node-name"] == self.parent.as_str());
            // Those of QEMU's block jobs write through (`mirror_top`, `commit_top`).
            has_below && !node["drv"].as_str().unwrap_or_default().ends_with("_top")
        };
        nodes.as_array()?.iter().find(is_over)?["node-name"].as_str()
    }

    fn is_below(&self, overlay: &str) -> DriveError {
        DriveError::Failed(format!(
            "the disk {} is not written any more: the node {overlay} was put over it (a snapshot), so the standby lacks what is written. \
             Protect the guest anew",
            self.parent
        ))
    }

    fn is_without_child(&self) -> DriveError {
        DriveError::Failed(format!(
            "the disk {0} is not written at the standby any more: somebody has taken the node {1} out of it (x-blockdev-change), so \
             the standby lacks what is written. Protect the guest anew",
            self.parent, self.node
        ))
    }
}

/// An error if it has ended although nobody wanted that.
fn check_job(disk: &str, job: &Value) -> Result<(), DriveError> {
    match job["status"].as_str() {
        Some("concluded" | "aborting" | "null") => {
            let why = job["error"].as_str().unwrap_or("it was ended by somebody else");
            Err(DriveError::Failed(format!("copying the disk {disk} to the standby failed: {why}")))
        }
        _ => Ok(()),
    }
}

/// Takes away what a protection left whose program was killed. How many nodes there were.
///
/// # Errors
/// The monitor's.
pub(super) fn remove_left_ones(vm: &mut Vm) -> Result<usize, DriveError> {
    let nodes = vm.execute("query-named-block-nodes", json!({"flat": true}))?;
    let names: Vec<_> = nodes
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|node| node["node-name"].as_str())
        .filter(|name| name.starts_with(PREFIX))
        .map(str::to_owned)
        .collect();
    names.iter().try_for_each(|name| remove(vm, name))?;
    Ok(names.len())
}

/// Ends the job that fills the node, takes it out of its quorum, and deletes it; whatever of that there is.
fn remove(vm: &mut Vm, node: &str) -> Result<(), DriveError> {
    vm.client().set_limit(ANSWER_LIMIT);
    let until = Instant::now() + END_LIMIT;
    while let Some(status) = job_status(vm, node)? {
        match status.as_str() {
            "concluded" => drop(vm.execute("job-dismiss", json!({"id": node}))?),
            // Asked for again until it ends: one that ends just now refuses.
            _ => drop(vm.try_execute("block-job-cancel", json!({"device": node, "force": true}))),
        }
        if Instant::now() >= until {
            return Err(DriveError::Failed(format!("the job {node} does not end")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let nodes = vm.execute("query-named-block-nodes", json!({"flat": true}))?;
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    if !nodes.iter().any(|found| found["node-name"] == node) {
        return Ok(());
    }
    for parent in nodes {
        let children = parent["children"].as_array().into_iter().flatten();
        for child in children.filter(|child| child["node-name"] == node) {
            let change = json!({"parent": parent["node-name"], "child": child["child"]});
            vm.execute("x-blockdev-change", change)?;
        }
    }
    vm.execute("blockdev-del", json!({"node-name": node})).map(drop)
}

fn job_status(vm: &mut Vm, id: &str) -> Result<Option<String>, DriveError> {
    let jobs = vm.execute("query-jobs", Value::Null)?;
    let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id);
    Ok(job.map(|job| job["status"].as_str().unwrap_or_default().to_owned()))
}
