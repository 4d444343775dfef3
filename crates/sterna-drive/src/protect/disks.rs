//! Replicates a QEMU's disks to the standby. Each disk gets an additional child, an NBD client that connects through
//! the relay.
//!
//! The disk must be a `quorum`, because only this node type of QEMU accepts a child while it is in use. A mirror job
//! first copies the content to the standby while the guest runs and writes. When both sides are equal, the guest is
//! stopped for a moment: the job ends, and the standby's side becomes a child.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::monitor::Monitor;
use super::names::DISK_PREFIX;
use super::quorum;
use super::relay::Relay;
use super::request::{DiskCopy, ProtectedDisk};
use crate::error::DriveError;
use crate::vm::{ANSWER_LIMIT, Vm};

/// Interval between two queries of the jobs.
const LOOK: Duration = Duration::from_millis(50);
/// How long a job may take to end when both sides are equal.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Disks that are also written at the standby.
pub(super) struct Disks {
    disks: Vec<Attached>,
}

struct Attached {
    /// The node name of the quorum.
    parent: String,
    /// The node name of the NBD client, and the id of the mirror job that fills it.
    node: String,
}

/// A disk that the guest writes and that is not copied to the standby.
pub(super) struct OtherDisk {
    /// The name that QEMU gives the disk.
    pub(super) name: String,
    /// A sentence for the operator.
    pub(super) remark: String,
}

/// Checks whether `disks` can be written at the standby, too. Returns the writable disks that are not in `disks`.
///
/// # Errors
/// The reason why a disk cannot be replicated, in one sentence.
pub(super) fn check(vm: &mut Vm, disks: &[ProtectedDisk]) -> Result<Vec<OtherDisk>, DriveError> {
    let nodes = vm.execute("query-named-block-nodes", json!({"flat": true}))?;
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    let devices = vm.execute("query-block", Value::Null)?;
    for ProtectedDisk { node, .. } in disks {
        let Some(found) = quorum::find(nodes, &devices, node) else {
            let why = format!("{} has no block node {node}: `query-named-block-nodes` lists them", vm.at());
            return Err(DriveError::Unfit(why));
        };
        let driver = found["drv"].as_str().unwrap_or_default();
        if driver != "quorum" || found["node-name"] != node.as_str() {
            return Err(DriveError::Unfit(format!(
                "the disk {node} is a `{driver}`, but QEMU can add a child only to a quorum, by its node's name: {}",
                quorum::advice(nodes, found)
            )));
        }
    }
    let others = devices.as_array().into_iter().flatten().filter_map(|device| {
        let inserted = device.get("inserted").filter(|inserted| inserted["ro"] == false)?;
        let node = inserted["node-name"].as_str().unwrap_or_default();
        let name = [&device["qdev"], &device["device"]].into_iter().filter_map(Value::as_str);
        let name = name.into_iter().find(|name| !name.is_empty()).unwrap_or(node);
        let remark = format!(
            "the disk {name} (block node {node}) is not replicated to the standby: both hosts must share it, or give \
             its quorum with --disk"
        );
        (!disks.iter().any(|disk| disk.node == node)).then(|| OtherDisk { name: name.to_owned(), remark })
    });
    Ok(others.collect())
}

impl Disks {
    /// Copies each of `disks` to the standby, and makes QEMU write it there from then on. `goes_on` gets the progress.
    ///
    /// # Errors
    /// QEMU refuses, the copy fails, or `goes_on` fails. The added nodes are removed again.
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
                .map(|(index, disk)| Attached {
                    parent: disk.node.clone(),
                    node: format!("{DISK_PREFIX}{index}"),
                })
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
            // A silent connection would block QEMU.
            relay.close();
            // The operator must get the first error.
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
                    "the disk {} cannot be replicated to the standby: {error}",
                    attached.parent
                ))
            };
            monitor.execute("blockdev-add", node, ANSWER_LIMIT).map_err(|error| {
                // QEMU does not report the reason that the standby gives.
                DriveError::Failed(format!(
                    "the disk {} cannot be replicated to the standby: {error}. The standby must have a disk with the \
                     name {} (`sterna standby --disk {}=FILE,size=SIZE`)",
                    attached.parent, disk.export, disk.export
                ))
            })?;
            let job = json!({
                "job-id": attached.node, "device": attached.parent, "target": attached.node, "sync": "full",
                // In this mode both sides stay equal, even if the guest writes quickly.
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

    /// Ends the jobs and adds the children. Both sides of every disk are equal and stay equal.
    fn become_children(&self, monitor: &Monitor) -> Result<(), DriveError> {
        // Stopped, because a write between the end of the job and the addition of the child would be missing.
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

    /// The mirror jobs, each with the name of its disk.
    fn jobs(&self, monitor: &Monitor) -> Result<Vec<(String, Value)>, DriveError> {
        let jobs = monitor.execute("query-jobs", Value::Null, ANSWER_LIMIT)?;
        let find = |disk: &Attached| {
            let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == disk.node.as_str());
            let job =
                job.cloned().unwrap_or_else(|| json!({"status": "concluded", "error": "the job is gone"}));
            (disk.parent.clone(), job)
        };
        Ok(self.disks.iter().map(find).collect())
    }

    /// Checks that QEMU still writes each disk at the standby. An operator can remove a child without any event.
    ///
    /// # Errors
    /// QEMU does not write a disk there any more, or the monitor fails.
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

    /// Removes the standby's side. The guest may run or be paused.
    ///
    /// # Errors
    /// QEMU refuses.
    pub(super) fn remove(&self, monitor: &Monitor) -> Result<(), DriveError> {
        self.disks.iter().map(|disk| monitor.with(|vm| remove(vm, &disk.node))).fold(Ok(()), Result::and)
    }
}

impl Attached {
    /// Whether the disk has the standby's side as a child. A child that was removed and added again since the last
    /// check has its old name, so this is not noticed.
    fn has_child_in(&self, nodes: &Value) -> bool {
        let mut nodes = nodes.as_array().into_iter().flatten();
        let parent = nodes.find(|node| node["node-name"] == self.parent.as_str());
        let children = parent.and_then(|parent| parent["children"].as_array());
        children.into_iter().flatten().any(|child| child["node-name"] == self.node.as_str())
    }

    /// The node that receives the guest's writes instead of the disk, if one was inserted above it.
    fn overlay_in<'a>(&self, nodes: &'a Value) -> Option<&'a str> {
        let is_over = |node: &&Value| {
            let children = node["children"].as_array();
            let has_below = children
                .into_iter()
                .flatten()
                .any(|child| child["child"] == "backing" && child["node-name"] == self.parent.as_str());
            // The filters of QEMU's block jobs (`mirror_top`, `commit_top`) write through to the disk.
            has_below && !node["drv"].as_str().unwrap_or_default().ends_with("_top")
        };
        nodes.as_array()?.iter().find(is_over)?["node-name"].as_str()
    }

    fn is_below(&self, overlay: &str) -> DriveError {
        DriveError::Failed(format!(
            "the guest does not write to the disk {} any more, because a snapshot has put the node {overlay} over it. \
             The standby does not get the new data: protect the guest again",
            self.parent
        ))
    }

    fn is_without_child(&self) -> DriveError {
        DriveError::Failed(format!(
            "the disk {0} is not replicated any more, because another client of QEMU's monitor has removed the node \
             {1} from it (x-blockdev-change). The standby does not get the new data: protect the guest again",
            self.parent, self.node
        ))
    }
}

/// Fails if the job has ended without our request.
fn check_job(disk: &str, job: &Value) -> Result<(), DriveError> {
    match job["status"].as_str() {
        Some("concluded" | "aborting" | "null") => {
            let why = job["error"].as_str().unwrap_or("another client of QEMU's monitor ended the job");
            Err(DriveError::Failed(format!("copying the disk {disk} to the standby failed: {why}")))
        }
        _ => Ok(()),
    }
}

/// Removes the nodes that a killed `sterna protect` left. Returns their number.
///
/// # Errors
/// The monitor's error.
pub(super) fn remove_left_ones(vm: &mut Vm) -> Result<usize, DriveError> {
    let nodes = vm.execute("query-named-block-nodes", json!({"flat": true}))?;
    let names: Vec<_> = nodes
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|node| node["node-name"].as_str())
        .filter(|name| name.starts_with(DISK_PREFIX))
        .map(str::to_owned)
        .collect();
    // Every node is tried, even if another one fails.
    let removed = names.iter().map(|name| remove(vm, name)).fold(Ok(()), Result::and);
    removed.map(|()| names.len())
}

/// Ends the mirror job, removes the node from its quorum, and deletes it. Missing parts are skipped.
fn remove(vm: &mut Vm, node: &str) -> Result<(), DriveError> {
    vm.client().set_limit(ANSWER_LIMIT);
    let until = Instant::now() + END_LIMIT;
    while let Some(status) = job_status(vm, node)? {
        match status.as_str() {
            "concluded" => drop(vm.execute("job-dismiss", json!({"id": node}))?),
            // Repeated until the job has ended: a job that is just ending refuses to be cancelled.
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
