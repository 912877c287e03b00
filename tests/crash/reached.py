"""Which writer of the suite tries each place that changes files, and what tries the others."""

_BY_WRITER = {
    "prep-mixture": (
        "nmoe_core.base.fingerprint:keep_digests",
        "nmoe_core.prep.incremental.existing:retire_beside",
        "nmoe_core.prep.incremental.existing:swap_in",
        "nmoe_core.prep.incremental.tables:_save",
        "nmoe_core.prep.incremental.tables:join_tables",
        "nmoe_core.prep.journal:Journal.remove",
        "nmoe_core.prep.one_pass:Pass._find_known",
        "nmoe_core.prep.run:_make",
        "nmoe_core.prep.run:_run",
        "nmoe_core.prep.run:write_manifest",
        "nmoe_core.prep.versions:_link_version",
        "nmoe_core.prep.versions:keep_version",
        "nmoe_core.shards.links:link_or_copy",
        "nmoe_core.shards.links:link_tree",
        "nmoe_core.shards.manifest:commit_manifest",
        "nmoe_core.shards.shard_file:OpenShardFile.publish",
        "nmoe_core.shards.writer:ShardWriter.__init__",
        "nmoe_core.shards.writer:ShardWriter.add_file",
        "nmoe_core.shards.writer:ShardWriter.commit",
    ),
    "prep-mixture of transforms": (
        "nmoe_core.prep.incremental.known_keys:KeyWriter.__init__",
        "nmoe_core.prep.incremental.known_keys:KeyWriter.close",
        "nmoe_core.prep.incremental.known_keys:keep_keys",
        "nmoe_core.prep.incremental.known_keys:seal_keys",
        "nmoe_core.prep.incremental.shared_keys:_Parts._flush",
        "nmoe_core.prep.incremental.shared_keys:_save",
        "nmoe_core.prep.incremental.shared_keys:find_shared",
    ),
    "hydra slices": (
        "nmoe_core.labels.slices:_combine_split",
        "nmoe_core.labels.slices:_combining",
        "nmoe_core.labels.slices:_commit",
        "nmoe_core.labels.slices:combine_slices",
        "nmoe_core.labels.slices:write_source_slices",
    ),
    "hydra oracle-label": (
        "nmoe_core.labels.label_files:write_summary",
        "nmoe_core.labels.label:_Labelling.finish",
        "nmoe_core.labels.label:label_shard",
    ),
    "hydra merge-labels": (
        "nmoe_core.labels.agreement:merge_noise",
        "nmoe_core.labels.label_files:merge_labels",
    ),
    "train student": (
        "nmoe_core.quality.heads.head_files:write_tensors",
        "nmoe_core.quality.heads.student_file:make_student",
    ),
    "hydra calibrate": (
        "nmoe_core.quality.calibration.calibrate:_committed",
        "nmoe_core.quality.calibration.calibrate:calibrate",
        "nmoe_core.quality.calibration.kept_scores:keep_scores",
    ),
    "hydra grade": (
        "nmoe_core.quality.calibration.graded:PartialRows.__init__",
        "nmoe_core.quality.calibration.graded:PartialRows._write_note",
        "nmoe_core.quality.calibration.graded:PartialRows.commit",
        "nmoe_core.quality.grading.grade:grade_documents",
    ),
    "hydra grade --set grading.grader=none": (
        "nmoe_core.quality.grading.rules_only:keep_documents",
    ),
    "attributes": (
        "nmoe_core.attributes.attribute:replace_rows",
        "nmoe_core.shards.attribute_file:write_attribute",
        "nmoe_core.attributes.own.files:join_attribute",
        "nmoe_core.attributes.shared:_write",
        "nmoe_core.attributes.shared:write_changed",
    ),
    "curate shards": (
        "nmoe_core.curate.shards.combine:combine_curated",
        "nmoe_core.curate.topics.assign:assign_topics",
    ),
    "loader plan": (
        "nmoe_core.tasks.curate:make_plan",
        "nmoe_core.tasks.report.account:commit_account",
    ),
    "export megatron": (
        "nmoe_core.shards.export.raw:write_megatron",
        "nmoe_core.shards.export.run:export",
    ),
    "export olmo": ("nmoe_core.shards.export.raw:write_olmo",),
    "export mds": ("nmoe_core.shards.export.mds:write",),
    "export llmc": ("nmoe_core.shards.export.raw:write_llmc",),
    "export parquet": ("nmoe_core.shards.export.text:write_texts",),
    "remix": ("nmoe_core.audit.plans.remix:write_remix",),
    "twin": ("nmoe_core.audit.plans.twin:write_twin",),
    "blocks": ("loader.files.blocks:write_blocks",),
    "block cache": (
        "loader.files.block_cache:BlockCache._make_room",
        "loader.files.block_cache:BlockCache._put",
    ),
    "mirror": (
        "loader.files.stores.store:copy",
        "loader.plan.remote:_fetch_file",
        "loader.files.locks:locked",
        "loader.plan.remote:_write",
        "loader.plan.remote:fetch_whole",
    ),
    "generate": (
        "nmoe_core.tasks.generate.completions:_Completer.resume",
        "nmoe_core.tasks.generate.completions:complete_file",
    ),
    "fetch": (
        "nmoe_core.engine.weights.fetch.convert:convert_gguf",
        "nmoe_core.engine.weights.fetch.get:_made",
    ),
    "make-tiny-checkpoint": ("nmoe_core.engine.weights.tiny:_write",),
    "report --html": (
        "nmoe_core.report.plots.kept:kept_picture",
        "nmoe_core.tasks.report.write:write_report",
    ),
    "train probe": ("nmoe_core.quality.heads.train:HeadTraining.run",),
    "curate": (
        "nmoe_core.quality.embedding_cache:EmbeddingCache.append",
        "nmoe_core.quality.embedding_cache:EmbeddingCache.writer",
        "nmoe_core.curate.jsonl.record_files:lock_outputs",
        "nmoe_core.curate.jsonl.record_files:write_array",
        "nmoe_core.curate.jsonl.record_files:write_records",
        "nmoe_core.curate.jsonl.record_files:write_set_aside",
        "nmoe_core.curate.jsonl.run:_write",
        "nmoe_core.curate.jsonl.run:curate_file",
        "nmoe_core.curate.topics.model:save_tensors",
    ),
    "versions restore": ("nmoe_core.prep.versions:restore_version",),
    "versions remove": (
        "nmoe_core.prep.versions:_remove",
        "nmoe_core.prep.versions:remove_versions",
    ),
    "text of a trainer": (
        "nmoe_core.prep.text_source:_make",
        "nmoe_core.prep.text_source:tokenised",
    ),
    "regenerate-index": ("nmoe_core.shards.shard_file:regenerate_index",),
    "bisect": (
        "nmoe_core.cli.audit.plans:search",
        "nmoe_core.audit.plans.bisection:Replays.__init__",
        "nmoe_core.audit.plans.bisection:Replays._run",
        "nmoe_core.audit.plans.bisection:write_bisection",
    ),
    "train import-pt": ("nmoe_core.quality.heads.convert:import_pickle",),
    "hydra audit": ("nmoe_core.quality.grading.audit:_job",),
    "takedown --apply": (
        "nmoe_core.curate.takedown.record:_write_grams",
        "nmoe_core.curate.takedown.record:add_rows",
        "nmoe_core.tasks.takedown.labels:LabelsOf._erase",
        "nmoe_core.tasks.takedown.labels:LabelsOf._writing",
    ),
    "takedown --verify": ("nmoe_core.tasks.takedown.report:verify",),
    "takedown --mask": ("nmoe_core.tasks.takedown.report:mask_plan",),
    "seen --index": (
        "nmoe_core.audit.seen.index_files:_write",
        "nmoe_core.audit.seen.index_files:index_shard",
    ),
    "ablate": ("nmoe_core.tasks.ablate.result:ablate",),
    "curate calibrate-k": ("nmoe_core.curate.jsonl.run:calibrate_file",),
    "curate embed": ("nmoe_core.curate.jsonl.deep:embed_deep",),
    "curate compare": ("nmoe_core.cli.curate:run_compare",),
    "curate animate": ("nmoe_core.report.plots.animation:write_films",),
}
REACHED = {site: writer for writer, sites in _BY_WRITER.items() for site in sites}
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "test_a_stop_at_any_step_of_new_buckets_is_repaired_by_the_next_run": (
        "nmoe_core.curate.shards.combine:_commit_buckets",
        "nmoe_core.tasks.selection.buckets:fit_buckets",
    ),
    "test_a_kill_at_any_step_leaves_the_old_file_whole": (  # one call of `atomic_file`
        "nmoe_core.shards.columns:copy_columns",
        "nmoe_core.shards.export.plan:_write_masks",
        "nmoe_core.shards.export.plan:export_plan",
        "nmoe_core.cli.project.commands:_write_demo",
        "nmoe_core.cli.project.commands:_write_own",
        "nmoe_core.curate.jsonl.run:_draw",
        "nmoe_core.cli.mix:propose",
        "nmoe_core.tasks.ablate.mix.result:mix",
        "nmoe_core.tasks.ablate.mix.runs:Bench.bits",
        "nmoe_core.curate.topics.assign:fit_topic_model",
        "nmoe_core.quality.heads.head_files:current_header",
        "nmoe_core.shards.shard_file:IndexWriter.finalize",
        "nmoe_core.cli.project.ledger:commit_ledger",
        "nmoe_core.cli.project.update:add_sources",
        "nmoe_core.tasks.prep:make_shards",
        "nmoe_core.cli.project.write_docstrings:write_docstrings",
        "nmoe_core.text.harmony:encoding",
        "nmoe_core.text.vocabulary:ensure_vocabulary",
        "nmoe_core.text.vocabulary:keep",
        "nmoe_core.quality.grading.anchors:write_anchored_rubric",
        "nmoe_core.audit.readings.curves:LossTables.write",
        "nmoe_core.audit.readings.names:write_documents",
    ),
    "test_a_refused_pass_leaves_no_project": ("nmoe_core.cli.project.import_tokens:import_tokens",),
    "test_a_model_is_downloaded_once_and_its_licence_is_kept": (
        "nmoe_core.engine.weights.fetch.get:_from_wheel",
    ),
    "test_a_repository_of_the_hub_is_copied_to_a_directory_once": (
        "nmoe_core.engine.weights.fetch.get:_copy_of_hub",
    ),
    "test_a_partition_is_rebuilt_to_the_same_bytes_without_touching_its_directory_by_hand": (
        "nmoe_core.tasks.graph.records:forget",
    ),
    "test_a_log_cut_at_any_byte_has_the_complete_blocks_and_counts_the_rest": (
        "loader.rows.loss_log:LossLog.__init__",
    ),
    "test_torn_tail_is_cut_and_writing_goes_on": ("nmoe_core.labels.corrections:_append",),
    "test_kills_at_random_moments_lose_no_byte": (
        "nmoe_core.prep.journal:Journal._commit",
        "nmoe_core.prep.run:prep_shards",
        "nmoe_core.shards.shard_file:OpenShardFile.__init__",
        "nmoe_core.shards.writer:ShardWriter._take_up",
    ),
    "test_a_full_disk_is_one_error_and_the_next_run_completes": (
        "nmoe_core.prep.run:_remove_empty",
        "nmoe_core.shards.writer:ShardWriter.discard",
    ),
    "test_a_kill_at_any_step_of_a_forced_run_leaves_one_whole_version": (
        "nmoe_core.prep.incremental.existing:clear_beside",
    ),
    "test_a_run_whose_logs_could_not_be_deleted_goes_with_the_next": (
        "nmoe_assets.ops.retention:delete_run",
    ),
    "test_a_split_that_the_store_has_no_more_is_not_read_from_the_cache": (
        "loader.plan.remote:_fetch_manifests",
    ),
    "test_calibration_writes_what_users_know_and_does_no_work_twice": (
        "nmoe_core.quality.calibration.calibrate:_fit",
    ),
    "test_a_current_shard_costs_nothing_and_a_new_calibration_decides_again": (
        "nmoe_core.quality.calibration.graded:current_result",
    ),
    "test_a_killed_run_ends_in_the_bytes_of_a_whole_one": (
        "nmoe_core.labels.answers:Writer.__init__",
    ),
    "test_are_continued_after_a_kill": ("nmoe_core.labels.answers:Writer.take_over",),
    "test_answers_from_a_file_make_the_labels_that_a_server_makes": (
        "nmoe_core.labels.batch:add_answers",
        "nmoe_core.labels.batch:write_requests",
    ),
    "test_documents_that_are_added_hardly_change_the_sample": (
        "nmoe_core.labels.sample:draw_sample",
    ),
    "test_a_plan_is_the_same_each_time_and_the_next_one_adds_other_documents": (
        "nmoe_core.labels.sample:add_planned",
    ),
    "test_a_killed_run_goes_on_after_its_last_part_and_writes_the_same_bytes": (
        "nmoe_core.attributes.attribute:Parts.remove",
        "nmoe_core.attributes.attribute:Parts.rows",
        "nmoe_core.tasks.attributes:describe_file",
    ),
    "test_progress_is_on_disk_while_labelling_and_gone_after_it": (
        "nmoe_core.labels.label:_Labelling.finished",
    ),
    "test_a_proof_is_of_the_record_whose_texts_were_searched": (
        "nmoe_core.audit.takedown.proof:prove",
    ),
    "test_a_damaged_store_is_made_again": ("nmoe_core.quality.kept_states:_opened",),
    "test_states_of_other_blocks_are_deleted_only_if_there_is_no_room": (
        "nmoe_core.quality.kept_states:KeptStates._make_room",
    ),
    "test_a_split_on_another_file_system_is_replaced_by_copies": (
        "nmoe_core.prep.incremental.existing:_copy_durably",
        "nmoe_core.prep.incremental.existing:_replace_shard",
    ),
    "test_an_equal_file_that_was_damaged_is_made_again": (
        "nmoe_core.shards.links:keep_equal_files",
    ),
    "test_a_second_fetch_copies_only_damaged_or_missing_files": (
        "loader.files.block_cache:BlockCache.is_whole",
    ),
    "test_a_damaged_memory_only_makes_the_walk_slower": (
        "nmoe_core.tasks.graph.looked:Looked.keep",
    ),
    "test_a_task_killed_at_any_write_loses_and_mixes_nothing": (
        "nmoe_core.base.bucket.bucket:Bucket._begin",
        "nmoe_core.base.bucket.ahead:fetch",
        "nmoe_core.base.bucket.bucket:Bucket.replaced",
        "nmoe_core.base.bucket.paths:BucketPath.unlink",
        "nmoe_core.base.bucket.writers:Writers.writing",
    ),
    "test_a_writer_that_fails_changes_nothing_and_the_next_one_gets_its_files": (
        "nmoe_core.base.bucket.bucket:Bucket._drop_if_outdated",
        "nmoe_core.base.bucket.bucket:Bucket._set_aside",
        "nmoe_core.base.bucket.bucket:Bucket.remove",
        "nmoe_core.base.bucket.writers:_covers",
    ),
    "test_copies_stay_below_their_limit_and_used_ones_stay": (
        "nmoe_core.base.bucket.local:LocalFiles.make_room",
    ),
}
"""What a test of one place tries."""
UNTRIED: dict[str, tuple[str, ...]] = {
    "for display, or a copy of what comes with the package: the next call makes it again": (
        "nmoe_assets.verbs:_set_up",
        "nmoe_core.cli.project.commands:_copy_configs",
        "nmoe_core.labels.label:_Labelling._show_partial",
        "nmoe_core.tasks.report.curate_pictures:topic_pictures",
    ),
    "files in a directory of one process, or a cache that is checked when it is read": (
        "loader.files.stores.store:copy_start",
        "nmoe_core.shards.publish.read:Opened._at_hand",
        "nmoe_core.audit.published:_fetch",
        "nmoe_core.shards.publish.read:opened",
        "nmoe_core.text.engines:_quicktok",
    ),
}
"""Places that no test disturbs, by the reason."""
